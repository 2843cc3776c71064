"""The command line: one file a verb, options declared once, one place that prints, one error boundary."""
