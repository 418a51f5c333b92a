"""The command line `stio`: one module for each command, on top of the public functions and of `open_checkpoint`.

`main.py` holds the group of commands, and turns each end of a command into an exit status and at most one line on
standard error. `output.py` holds what the commands share: texts for names, sizes, errors and advice, the progress bar,
common options. `interrupts.py` controls Ctrl-C at the start and at the end of the program. `stio.__main__` imports it
before click, so this module imports nothing.

Invariants: no command imports torch before it needs it, so `inspect`, `verify`, `diff` and `gc` answer at once. Text
from a file is escaped before it reaches a terminal. `--json` prints every figure of the plain output. Start with
`main.py`, then read one command, for example `gc.py`.
"""
