"""Run the command line as `python -m shardwise`."""

import runpy

if __name__ == "__main__":
    runpy.run_module("shardwise.cli", run_name="__main__", alter_sys=True)
