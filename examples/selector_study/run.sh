#!/usr/bin/env bash
# The selector study: benchmark items among the handbook's documents, hold-out templates, two models.
#
#   examples/selector_study/run.sh smollm2             # the demo model; about three hours on one core
#   examples/selector_study/run.sh gemma FILE.gguf     # Gemma 3 270M (`make gemma` prints the file), about two hours
#
# It can be broken off and started again: what is recorded is not run again.
set -euo pipefail
cd "$(dirname "$0")/../.."
name=$1
model=(${2:+--model "$2"})
items=.cache/selector_study/$name
here=examples/selector_study/$name
kvfix=${KVFIX:-.venv/bin/kvfix}
mkdir -p "$items" "$here"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

gemma=; [ "$name" = gemma ] && gemma=1
pick() { [ $gemma ] && echo "$2" || echo "$1"; } # how many items: SmolLM2, Gemma

generate() { # file, options
    local file=$items/$1.jsonl; shift
    [ -f "$file" ] || "$kvfix" bench items "${model[@]}" --generate "$@" --filler corpora/handbook --items "$file"
}
run() { # items, records, options
    local from=$items/$1.jsonl to=$here/$2.jsonl; shift 2
    [ ! -f "$to.gz" ] || [ -f "$to" ] || gzip -dk "$to.gz"
    "$kvfix" bench items "${model[@]}" --items "$from" --out "$to" --seeds 3 "$@"
}

generate derived derived --count 120
generate d250 distance --distances 250 --count 120
generate d1500 distance --distances 1500 --count 80 --context 2800
generate direct direct --count 40
generate length distance --distances 250 --variant length --count 60
generate edits derived --variant edits --count 60
generate implicit implicit --distances 250 --count 80
generate chain chain --distances 0 --count 120
generate long derived --context 5000 --count 30

published=editlocal,structure,attention,deviation,epic,random
run derived main --selectors linked,$published --limit "$(pick 120 84)"
run d250 main --selectors editlocal,linked --limit "$(pick 72 60)"
run d1500 main --selectors editlocal,linked --limit "$(pick 36 30)"
run derived main --selectors linked,editlocal,structure,attention,deviation,random --k 8,16,64 --seeds 1 --limit "$(pick 24 16)"
run direct main --selectors $published --k 8 --seeds 1 --limit 20
run derived main --selectors structure,attention,deviation,random --seeds 1 --limit "$(pick 36 36)" --transplant 20
[ $gemma ] || run derived causal --selectors causal --k 8,32 --limit 12 --transplant 20 # dear: a pass for every row
run length length --selectors editlocal,linked --limit 24
run edits edits --selectors editlocal,linked --limit 24
run implicit frontier --selectors editlocal,linked,kindred,asked --k 32,64 --limit "$(pick 40 24)"
[ $gemma ] || run long long --selectors editlocal,linked,structure,attention,deviation --limit 10
[ $gemma ] || run chain frontier --selectors editlocal,linked,kindred,asked --k 32,64 --limit 40

export COLUMNS=140
for records in main causal edits length long frontier; do
    [ ! -f "$here/$records.jsonl" ] || { echo "== $records"; "$kvfix" bench items --report-only --out "$here/$records.jsonl"; echo; }
done > "$here/report.txt" 2>&1
"$kvfix" bench items --report-only --quiet --out "$here/main.jsonl" --plots "$here"
