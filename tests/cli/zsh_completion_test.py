"""`shoal completion zsh`: what zsh offers at a terminal when a user presses Tab.

    python zsh_completion_test.py SHOAL
"""

import os
import pty
import re
import select
import shutil
import signal
import sys
import tempfile
import time

SKIPPED = 77
LIMIT_SECONDS = 60


class Zsh:
    """An interactive zsh without any user's settings, in a folder of its own."""

    def __init__(self, shoal, folder):
        pid, self.terminal = pty.fork()
        if pid == 0:
            os.chdir(folder)
            path = os.path.dirname(shoal) + ":" + os.environ["PATH"]
            environment = dict(os.environ, TERM="dumb", HOME=folder, PATH=path)
            os.execvpe("zsh", ["zsh", "-f", "-i"], environment)
        self.pid = pid
        self.prompts = 0

    def send(self, text):
        os.write(self.terminal, text.encode())

    def read_until(self, *wanted, again=""):
        """What the terminal shows until it shows all of these; fails with it when the time is over.

        again: keys that are pressed every two seconds meanwhile.
        """
        shown, end, pressed = "", time.time() + LIMIT_SECONDS, time.time() - 1
        while not all(part in shown for part in wanted):
            assert time.time() < end, "zsh does not show %s:\n%s" % (wanted, shown)
            if again and time.time() - pressed > 2:
                self.send(again)
                pressed = time.time()
            if select.select([self.terminal], [], [], 0.2)[0]:
                text = os.read(self.terminal, 65536).decode(errors="replace")
                shown += re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]|[\x07\r]", "", text)
        return shown

    def offers(self, line, *wanted):
        """What a Tab behind this line shows, then an empty line again."""
        self.send(line)
        shown = self.read_until(*wanted, again="\t")
        self.run("\x15")  # the line is thrown away
        return shown

    def run(self, command):
        """Ends when zsh reads keys again: a Tab that comes earlier is a Tab in the text."""
        self.prompts += 1
        self.send(command + "\nPS1='rea''dy%d> '\n" % self.prompts)
        self.read_until("ready%d> " % self.prompts)

    def end(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def main():
    shoal = os.path.abspath(sys.argv[1])
    if shutil.which("zsh") is None:
        print("skipped: zsh is missing")
        return SKIPPED
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(os.path.join(folder, "checkpoints-here"))
        zsh = Zsh(shoal, folder)
        try:
            zsh.run("zstyle ':completion:*' insert-tab false")  # also where more keys have arrived
            zsh.run("autoload -Uz compinit && compinit -u -D; eval \"$(shoal completion zsh)\"")
            zsh.offers("shoal comple", "tion ")
            zsh.offers("shoal checkpoint ", "export ", "inspect ", "reshard ", "verify ", "compares checksums")
            zsh.offers("shoal train --strat", "egy ")
            values = zsh.offers("shoal train --strategy zer", "zero1", "zero2")
            assert "ddp" not in values, values
            zsh.offers("shoal train --save check", "checkpoints-here/")
            zsh.offers("shoal launch -n 2 -- ./program check", "checkpoints-here/")
        finally:
            zsh.end()
    print("zsh offers commands, options, values and files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
