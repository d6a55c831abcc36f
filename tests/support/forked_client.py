"""The program of ``support.forked_interpreter``: ``python ARGUMENTS`` by a fork of its server, where that has what is asked for."""

import json
import os
import socket
import sys

FORKED = ("-P -m strop.rollouts.tokenizing_worker", "setup_worker.py")  # otherwise an interpreter begins as any other

arguments = sys.argv[1:]
command = " ".join(arguments)
if not (command.startswith(FORKED[0]) or os.path.basename(arguments[0]) == FORKED[1]):
    os.execv(sys.executable, [sys.executable, *arguments])
request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
server.sendall(request)
for number in range(3):
    os.close(number)  # it is for the fork to read, and to close what it writes
os._exit(int(server.recv(16) or b"1") & 0xFF)
