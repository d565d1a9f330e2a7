"""temp"""
import json,sys
from agent_run_ledger.cli.terminal import Progress
def main():
    from agent_run_ledger.demo.stage import play
    print(json.dumps(play(None, Progress(sys.stderr)),indent=1))
