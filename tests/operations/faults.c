/* Preloaded: counts the system calls that change something below a directory, and lets one of them, or all from one
   on, fail or kill the process. Written for tests; Linux and glibc. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, REMOVE = 4 };

static char below[PATH_MAX];
static long nth, calls;
static int kinds, failure, lasting;
static char what[64];

/* failure 0 kills; kinds is a sum of READ, WRITE and REMOVE; lasting: all calls from the nth on. */
void kvfix_faults_arm(const char *directory, long at, int of, int error, int all)
{
    calls = 0, nth = at, kinds = of, failure = error, lasting = all, what[0] = 0;
    strncpy(below, directory, sizeof below - 1);
}

long kvfix_faults_calls(void) { return calls; }
const char *kvfix_faults_what(void) { return what; }

static int strikes(const char *path, int kind, const char *name)
{
    if (!below[0] || !(kinds & kind) || !path || strncmp(path, below, strlen(below)))
        return 0;
    long now = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
    if (now < nth || (now > nth && !lasting))
        return 0;
    if (now == nth)
        snprintf(what, sizeof what, "%s %s", name, strrchr(path, '/') + 1);
    if (!failure)
        kill(getpid(), SIGKILL);
    errno = failure;
    return 1;
}

static int strikes_fd(int fd, int kind, const char *name)
{
    char link[32], path[PATH_MAX];
    int kept = errno;
    if (!below[0])
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (length < 0)
        return 0;
    path[length] = 0;
    return strikes(path, kind, name);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int kind_of(int flags) { return flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) ? WRITE : READ; }

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                        \
        va_end(more);                                                                                                  \
        return strikes(path, kind_of(flags), "open") ? -1 : REAL(name)(path, flags, mode);                             \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                                   \
    int name(int at, const char *path, int flags, ...)                                                                 \
    {                                                                                                                  \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                                        \
        va_end(more);                                                                                                  \
        return strikes(path, kind_of(flags), "open") ? -1 : REAL(name)(at, path, flags, mode);                         \
    }
OPENAT(openat)
OPENAT(openat64)

#define ON_FD(type, name, parameters, arguments)                                                                       \
    type name parameters { return strikes_fd(fd, WRITE, #name) ? -1 : REAL(name) arguments; }
ON_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size))
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
ON_FD(int, fsync, (int fd), (fd))
ON_FD(int, fdatasync, (int fd), (fd))
ON_FD(int, ftruncate, (int fd, off_t size), (fd, size))
ON_FD(int, ftruncate64, (int fd, off64_t size), (fd, size))

int rename(const char *from, const char *to)
{
    return strikes(to, WRITE, "rename") ? -1 : REAL(rename)(from, to);
}

int link(const char *from, const char *to) { return strikes(to, WRITE, "link") ? -1 : REAL(link)(from, to); }
int mkdir(const char *path, mode_t mode) { return strikes(path, WRITE, "mkdir") ? -1 : REAL(mkdir)(path, mode); }
int unlink(const char *path) { return strikes(path, REMOVE, "unlink") ? -1 : REAL(unlink)(path); }
int rmdir(const char *path) { return strikes(path, REMOVE, "rmdir") ? -1 : REAL(rmdir)(path); }
