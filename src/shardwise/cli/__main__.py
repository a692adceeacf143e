"""Run the command line as `python -m shardwise.cli`."""

import signal

# Let a rank that is interrupted during imports end without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from shardwise.cli import main

if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if __name__ == "__main__":
    main()
