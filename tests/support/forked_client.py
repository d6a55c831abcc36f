"""The program of ``support.forked_interpreter``: ``python ARGUMENTS`` by a fork of its server, where that has what is asked for."""

import json
import os
import socket
import sys

MODULES = ("strop.extensions.recorded.tokenizing_pool",)  # these, Ray's workers and code (-c) are forked

arguments = sys.argv[1:]
module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:2] else None
if not (module in MODULES or arguments[0] == "-c" or os.path.basename(arguments[0]) == "setup_worker.py"):
    os.execv(sys.executable, [sys.executable, *arguments])
request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "socket"))
socket.send_fds(server, [len(request).to_bytes(8, "little")], [0, 1, 2])
server.sendall(request)
for number in range(3):
    os.close(number)  # it is for the fork to read, and to close what it writes
os._exit(int(server.recv(16) or b"1") & 0xFF)
