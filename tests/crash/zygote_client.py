"""An interpreter that starts in milliseconds: `crash/zygote_main.py` runs its command line in a process that it forks.

`crash.zygote.Zygote` writes this program with the address of that process. The forked process has the arguments, the
environment, the working directory and the open files of this one. Limits, groups and priority are those of its parent.
"""

# `socket` and `signal` import `enum`, which would double what this program takes.
import _signal
import _socket
import marshal
import os
import sys

ADDRESS = ""

files = []
for name in os.listdir("/proc/self/fd"):
    try:
        if os.get_inheritable(int(name)):  # what this process has inherited; it opens no such file itself
            files.append(int(name))
    except OSError:
        pass  # the listing's own
server = _socket.socket(_socket.AF_UNIX)
server.connect(f"\0{ADDRESS}")
for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGABRT, _signal.SIGUSR1, _signal.SIGTERM):
    _signal.signal(number, lambda number, _: server.send(bytes([number])))
numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
server.sendmsg([b"."], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)])
request = {"argv": sys.argv[1:], "cwd": os.getcwd(), "environment": dict(os.environ), "files": files}
server.sendall(marshal.dumps(request))
status = int(server.recv(64))
if status < 0:
    _signal.signal(-status, _signal.SIG_DFL) if -status not in (_signal.SIGKILL, _signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
os._exit(status)
