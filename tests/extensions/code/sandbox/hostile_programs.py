# ruff: noqa: E501
"""Hostile programs: what each tries, and how it may end. A program that reaches what it wanted prints ESCAPED."""

from __future__ import annotations

from dataclasses import dataclass

EXIT, TIME, MEMORY, OUTPUT, SIGNAL, COMPILE = "exit", "time", "memory", "output", "signal", "compile"

# Before each Python program: attempt() runs an action and says whether it was refused.
PRELUDE = """
import ctypes, errno, os, signal, socket, struct, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(action):
    try:
        value = action()
    except BaseException as error:
        print("refused", type(error).__name__)
    else:
        print("ESCAPED", repr(value)[:200])
def call(number, *arguments):
    value = libc.syscall(number, *arguments)
    if value < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return value
"""


@dataclass(frozen=True)
class HostileProgram:
    """A program; ``ends`` are the ways in which it may end, and ``says`` is what its output must have."""

    name: str
    source: str
    ends: tuple[str, ...] = (EXIT,)
    language: str = "python"
    says: str = ""


def python(name: str, source: str, *ends: str, says: str = "") -> HostileProgram:
    return HostileProgram(name, PRELUDE + source, ends or (EXIT,), "python", says)


def attempt(name: str, expression: str) -> HostileProgram:
    """An action that must raise."""
    return python(name, f"attempt(lambda: {expression})", says="refused")


def bash(name: str, source: str, *ends: str, says: str = "") -> HostileProgram:
    return HostileProgram(name, source, ends or (EXIT,), "bash", says)


def c(name: str, source: str, *ends: str, says: str = "") -> HostileProgram:
    return HostileProgram(name, source, ends or (EXIT,), "c", says)


def javascript(name: str, source: str, *ends: str, says: str = "") -> HostileProgram:
    return HostileProgram(name, source, ends or (EXIT,), "javascript", says)


PROCESSES = (
    python(
        "forks until it is refused",
        "try:\n  while True:\n    if os.fork() == 0: time.sleep(9)\nexcept OSError: print('refused')",
        says="refused",
    ),
    python("forks for ever", "while True:\n  try: os.fork()\n  except OSError: pass", TIME, MEMORY),
    bash("the fork bomb of the shell", ":(){ :|:& };:; sleep 5", EXIT, TIME, MEMORY, SIGNAL),
    c("forks for ever in C", "#include <unistd.h>\nint main(){for(;;)fork();}", TIME, MEMORY),
    python(
        "starts threads until it is refused",
        "import threading\ntry:\n  while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\nexcept RuntimeError: print('refused')",
        says="refused",
    ),
    python("leaves a child behind", "if os.fork() == 0: time.sleep(60)\nprint('left')", says="left"),
    python(
        "leaves a daemon in a session of its own",
        "if os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    for fd in range(3): os.close(fd)\n    time.sleep(60)\n  os._exit(0)\nprint('left')",
        says="left",
    ),
    bash("leaves a background job", "nohup setsid sleep 60 >/dev/null 2>&1 & echo left", says="left"),
    python("leaves zombies", "for i in range(10):\n  if os.fork() == 0: os._exit(0)\nprint('left')", says="left"),
    javascript(
        "starts processes in JavaScript",
        "const {spawn}=require('child_process');for(let i=0;i<200;i++)spawn('/bin/sleep',['60']).on('error',()=>{});",
        EXIT,
        TIME,
        MEMORY,
        SIGNAL,
    ),
)

MEMORY_USERS = (
    python("fills the heap", "a = []\nwhile True: a.append(b'x' * 10**6)", MEMORY, EXIT),
    python("asks for more than there is", "attempt(lambda: bytearray(1 << 40))", says="MemoryError"),
    python(
        "fills shared memory",
        "import mmap\nm = mmap.mmap(-1, 1 << 28)\nfor i in range(0, 1 << 28, 4096): m[i] = 1\nprint('ESCAPED')",
        MEMORY,
        SIGNAL,
        EXIT,
    ),
    python(
        "fills memory in many processes",
        "for i in range(8): os.fork() if i < 3 else None\na = b'x' * (30 << 20)\ntime.sleep(9)",
        MEMORY,
        TIME,
    ),
    attempt("fills a file in memory that no limit counts", "os.memfd_create('a')"),
    *(
        attempt(f"makes a pair of sockets of family {family}", f"call(53, {family}, 1, 0, ctypes.create_string_buffer(8))")
        for family in (2, 10, 16, 40)
    ),
    attempt(
        "makes a pair of sockets with a family in the high half",
        "call(53, ctypes.c_ulong((1 << 32) | 2), 1, 0, ctypes.create_string_buffer(8))",
    ),
    attempt("takes the machine's contexts of asynchronous I/O", "call(206, 1, ctypes.byref(ctypes.c_ulong(0)))"),
    attempt("writes the unwritten data of all disks", "call(162)"),
    attempt("writes the unwritten data of a file system", "call(306, os.open('/usr', 0))"),
    attempt("watches what the machine opens", "call(294, 0)"),
    attempt("watches what the machine opens, by the older call", "call(253)"),
    attempt("drops the machine's cached files", "os.posix_fadvise(os.open('/usr/bin/env', 0), 0, 0, 4)"),
    attempt("starts the machine's handler of crashes", "1 / (__import__('resource').getrlimit(4) != (1, 1))"),
    attempt("fills System V shared memory", "call(29, 0, 1 << 20, 0o1777)"),
    attempt("opens a POSIX message queue", "call(240, b'queue', 66, 0o600, None)"),
    attempt("opens a System V message queue", "call(68, 0, 0o1777)"),
    attempt("opens System V semaphores", "call(64, 0, 1, 0o1777)"),
    python(
        "fills its folder",
        "try:\n  with open('a', 'wb') as f:\n    while True: f.write(b'x' * 10**6)\nexcept OSError: print('refused')",
        says="refused",
    ),
    python(
        "fills its folder with many files",
        "try:\n  for i in range(100):\n    with open(str(i), 'wb') as f: f.write(b'x' * (1 << 20))\nexcept OSError: print('refused')",
        says="refused",
    ),
    python(
        "fills /dev/shm",
        "try:\n  for i in range(100):\n    with open(f'/dev/shm/{i}', 'wb') as f: f.write(b'x' * (1 << 20))\nexcept OSError: print('refused')",
        says="refused",
    ),
    python(
        "makes files until it is refused",
        "try:\n  for i in range(10**6): open(str(i), 'w').close()\nexcept OSError as e: print('refused', e)",
        says="refused",
    ),
    python(
        "makes a sparse file of a terabyte",
        "attempt(lambda: os.truncate(os.open('a', os.O_CREAT | os.O_RDWR), 1 << 40))",
        EXIT,
        SIGNAL,
    ),
    python(
        "makes folders inside folders",
        "try:\n  for i in range(10**5):\n    os.mkdir('d'); os.chdir('d')\nexcept OSError: print('refused')",
        says="refused",
    ),
    c(
        "fills the heap in C",
        "#include <stdlib.h>\n#include <string.h>\nint main(){for(;;)memset(malloc(1<<20),1,1<<20);}",
        MEMORY,
        SIGNAL,
    ),
    c(
        "recurses without end",
        "int f(int n){volatile char a[4096]; a[0]=n; return f(n+1)+a[0];}\nint main(){return f(0);}",
        SIGNAL,
        MEMORY,
    ),
    javascript("fills the heap in JavaScript", "const a=[];for(;;)a.push(Buffer.alloc(1<<20,1))", MEMORY, SIGNAL, TIME),
    python(
        "opens files until it is refused",
        "a = []\ntry:\n  while True: a.append(open('/dev/null'))\nexcept OSError: print('refused')",
        says="refused",
    ),
    python("dumps core", "os.abort()", SIGNAL),
)

OUTPUT_WRITERS = (
    python("writes for ever to stdout", "while True: os.write(1, b'x' * 65536)", OUTPUT),
    python("writes for ever to stderr", "while True: os.write(2, b'x' * 65536)", OUTPUT),
    python("writes for ever to both", "while True: os.write(1, b'x' * 999); os.write(2, b'y' * 999)", OUTPUT),
    bash("yes", "yes", OUTPUT),
    python("writes from many processes", "os.fork(); os.fork()\nwhile True: os.write(1, b'x')", OUTPUT, TIME),
    python(
        "writes bytes that are no text",
        "os.write(1, bytes(range(256)) * 4 + b'\\xff\\xfe\\xed\\xa0\\x80')\nprint('done')",
        says="done",
    ),
)

FILES = (
    attempt("reads the users of the machine", "open('/etc/passwd').read()"),
    attempt("reads the passwords of the machine", "open('/etc/shadow').read()"),
    attempt("reads a secret of this machine", "open(SECRET).read()"),
    attempt("reads a secret through a symlink", "(os.symlink(SECRET, 'a'), open('a').read())"),
    attempt("makes a hard link to a program", "(os.link('/usr/bin/env', 'a'), open('a', 'ab'))"),
    attempt("writes into the system", "open('/usr/bin/evil', 'w')"),
    attempt("writes into the root folder", "open('/evil', 'w')"),
    attempt("changes the interpreter", "open(os.path.realpath(sys.executable), 'ab')"),
    attempt("writes beside the interpreter", "open(os.path.join(os.path.dirname(os.__file__), 'sitecustomize.py'), 'w')"),
    attempt("changes the worker", "open([a for a in sys.orig_argv if a.endswith('sandbox_worker.py')][0], 'ab')"),
    attempt("reads the memory of the init process", "open('/proc/1/mem', 'rb').read(1)"),
    attempt("goes out by /proc/1/root", "os.listdir('/proc/1/root/etc')"),
    attempt("reads the environment of other processes", "open('/proc/1/environ', 'rb').read()"),
    attempt("lists its parent's files", "os.listdir(f'/proc/{os.getppid()}/fd')"),
    attempt("writes its own memory", "open('/proc/self/mem', 'r+b')"),
    attempt("reads the kernel's log", "call(103, 3, ctypes.create_string_buffer(100), 100)"),
    attempt("triggers the kernel's keys", "open('/proc/sysrq-trigger', 'w').write('b')"),
    attempt("mounts /proc again", "call(165, b'proc', b'/tmp', b'proc', 0, None)"),
    attempt("takes the cover off /proc", "call(166, b'/proc', 2)"),
    attempt("changes its root folder", "os.chroot('.')"),
    attempt("opens a file by handle", "call(304, -100, ctypes.create_string_buffer(128), 0)"),
    attempt("makes a device", "os.mknod('sda', 0o60666, os.makedev(8, 0))"),
    attempt("reads a disk", "[open(f'/dev/{name}', 'rb') for name in ('vda', 'sda', 'nvme0n1') if os.path.exists(f'/dev/{name}') or 1/0]"),
    attempt("becomes root by a setuid program", "subprocess.run(['su', '-c', 'id'], check=True, capture_output=True)"),
    attempt("makes a setuid program of root", "os.chown(open('a', 'w').fileno(), 0, 0)"),
    attempt("becomes root", "os.setuid(0)"),
    python("has a private environment", "print('ESCAPED' if {'STROP_WITNESS', 'PYTHONPATH'} & set(os.environ) else 'clean')", says="clean"),
    python("has its streams and nothing else", "import stat\nopened = []\nfor fd in range(3, 4096):\n  try: os.fstat(fd); opened.append(fd)\n  except OSError: pass\nprint('ESCAPED' if opened else 'clean', opened)", says="clean"),
    bash("reads the machine in bash", "cat /etc/shadow /etc/passwd /root/.bashrc /proc/1/environ 2>/dev/null && echo ESCAPED; echo tried", says="tried"),
    javascript("reads the machine in JavaScript", "try{console.log('ESCAPED',require('fs').readFileSync('/etc/passwd'))}catch(e){console.log('refused')}", says="refused"),
)  # fmt: skip

NETWORK = (
    attempt("opens a TCP connection", "socket.create_connection(('127.0.0.1', PORT), 1)"),
    attempt("opens a TCP connection over IPv6", "socket.socket(socket.AF_INET6).connect(('::1', PORT))"),
    attempt("sends a datagram", "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"),
    attempt("listens", "socket.create_server(('127.0.0.1', 0))"),
    attempt("opens a raw socket", "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    attempt("opens a packet socket", "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"),
    attempt("opens a netlink socket", "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    attempt("connects to an abstract socket", "socket.socket(socket.AF_UNIX).connect('\\0strop_witness')"),
    attempt("opens a virtual machine's socket", "socket.socket(socket.AF_VSOCK).connect((2, 1))"),
    attempt("asks the name service", "socket.getaddrinfo('example.com', 80)"),
    attempt("opens an io_uring, which could open sockets", "call(425, 8, ctypes.create_string_buffer(256))"),
    bash("opens a connection in bash", "(exec 3<>/dev/tcp/127.0.0.1/PORT) 2>/dev/null && echo ESCAPED; echo tried", says="tried"),
    c("opens a connection in C", "#include <sys/socket.h>\n#include <stdio.h>\nint main(){puts(socket(AF_INET,SOCK_STREAM,0)<0?\"refused\":\"ESCAPED\");}", says="refused"),
    javascript("opens a connection in JavaScript", "require('net').connect(PORT,'127.0.0.1',()=>console.log('ESCAPED')).on('error',()=>console.log('refused'))", says="refused"),
)  # fmt: skip

KERNEL = (
    attempt("traces its parent", "call(101, 16, os.getppid(), 0, 0)"),
    attempt("is traced", "call(101, 0, 0, 0, 0)"),
    attempt("reads another process", "call(310, 1, None, 0, None, 0, 0)"),
    attempt("writes another process", "call(311, 1, None, 0, None, 0, 0)"),
    attempt("takes a descriptor of the init process", "call(438, os.pidfd_open(1), 0, 0)"),
    attempt("makes a user namespace", "call(272, 0x10000000)"),
    attempt("makes a mount namespace", "call(272, 0x20000)"),
    attempt("clones into a new namespace", "call(56, 0x10000000 | 17, 0, 0, 0, 0)"),
    attempt("clones into a new namespace by clone3", "call(435, struct.pack('QQQQQQQQ', 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64)"),
    attempt("joins a namespace", "call(308, os.pidfd_open(1), 0x20000000)"),
    attempt("mounts", "call(165, b'none', b'/tmp', b'tmpfs', 0, None)"),
    attempt("mounts by the new calls", "call(430, b'tmpfs', 0)"),
    attempt("makes the system writable", "call(165, None, b'/usr', None, 32 | 4096, None)"),
    attempt("loads a program into the kernel", "call(321, 5, ctypes.create_string_buffer(128), 128)"),
    attempt("counts the kernel's events", "call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)"),
    attempt("handles page faults", "call(323, 0)"),
    attempt("loads another kernel", "call(246, 0, 0, None, 0)"),
    attempt("loads a module", "call(313, 0, b'', 0)"),
    attempt("reboots", "call(169, 0xfee1dead, 672274793, 0x1234567, None)"),
    attempt("reads the keyring", "call(250, 0, -3, 1)"),
    attempt("adds a key", "call(248, b'user', b'a', b'b', 1, -3)"),
    attempt("changes its personality", "call(135, 0x0040000)"),
    attempt("sets the clock", "time.clock_settime(time.CLOCK_REALTIME, 0)"),
    attempt("renames the machine", "socket.sethostname('evil')"),
    attempt("types into a terminal", "__import__('fcntl').ioctl(0, 0x5412, b'x')"),
    attempt("raises its limits", "__import__('resource').setrlimit(4, (1 << 20, 1 << 20))"),
    attempt("changes the limits of the init process", "__import__('resource').prlimit(1, 7, (3, 3))"),
    attempt("calls a system call that is not known yet", "call(1000)"),
    c("calls the kernel by the interface of another architecture", "#include <stdio.h>\nint main(){long r=20;\n#ifdef __x86_64__\n__asm__ volatile(\"int $0x80\":\"+a\"(r));\n#else\nr=-1;\n#endif\nputs(r<0?\"refused\":\"ESCAPED\");}", EXIT, SIGNAL),
    c("loads code into its own memory and calls the kernel", "#include <sys/mman.h>\n#include <sys/syscall.h>\n#include <unistd.h>\n#include <stdio.h>\nint main(){puts(syscall(SYS_unshare,0x10000000)<0?\"refused\":\"ESCAPED\");}", says="refused"),
)  # fmt: skip

SIGNALS = (
    python("kills everything it can see", "os.kill(-1, 9)\nprint('alive')", EXIT, SIGNAL),
    python("kills the init process", "try: os.kill(1, 9)\nexcept PermissionError: pass\ntime.sleep(0.1)\nprint('alive')", EXIT, says="alive"),
    python("kills its parent with every signal", "for n in range(1, 65):\n  try: os.kill(os.getppid(), n)\n  except OSError: pass\ntime.sleep(0.1)\nprint('alive')", EXIT, says="alive"),
    python("kills its process group", "os.killpg(0, 9)", SIGNAL),
    python("stops its parent", "try: os.kill(1, signal.SIGSTOP)\nexcept PermissionError: pass\nprint('alive')", EXIT, says="alive"),
    python("crashes", "ctypes.string_at(0)", SIGNAL),
)  # fmt: skip

DODGES = (
    python("sleeps", "time.sleep(60)", TIME),
    python("stops itself", "os.kill(os.getpid(), signal.SIGSTOP)", TIME),
    python("counts for ever", "while True: pass", TIME),
    python("handles the signal of the time limit", "signal.signal(signal.SIGXCPU, lambda *a: None)\nwhile True: pass", TIME),
    python("ignores every signal", "for n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass", TIME),
    python("counts in many children, each below the limit", "for i in range(3): os.fork()\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\nif os.getppid() == 1: time.sleep(5)", TIME),
    python("counts in one child after the other", "while True:\n  if os.fork() == 0:\n    end = time.process_time() + 0.1\n    while time.process_time() < end: pass\n    os._exit(0)\n  os.wait()", TIME),
    python("never ends at its end", "import atexit\natexit.register(lambda: time.sleep(60))", TIME),
    python("matches a regular expression for ever", "import re\nre.match('(a+)+$', 'a' * 50 + 'b')", TIME),
    python("powers of powers", "9 ** 9 ** 9", TIME, MEMORY),
    bash("sleeps in bash", "trap '' TERM INT XCPU; sleep 60", TIME),
    c("counts for ever in C", "int main(){for(;;);}", TIME),
    javascript("counts for ever in JavaScript", "for(;;);", TIME),
)  # fmt: skip

POISONS = (
    python("changes the built-in functions", "import builtins, json\nbuiltins.print = builtins.len = lambda *a, **k: 41\njson.dumps = lambda *a, **k: '{}'\nsys.stdout.write('done')", says="done"),
    python("leaves a module for the next program", "for name in ('sitecustomize.py', 'usercustomize.py', 'json.py', 'os.py', '/tmp/math.py', '/dev/shm/a'):\n  open(name, 'w').write('print(41)')\nprint('done')", says="done"),
    python("finds what the program before it left", "names = [n for folder in ('/tmp', '/dev/shm', '/var/tmp') for n in os.listdir(folder)]\nprint('ESCAPED' if set(names) - {'main.py'} else 'clean', names)", says="clean"),
    python("finds a socket that another program left", "a, b = socket.socketpair()\nattempt(lambda: socket.socket(socket.AF_UNIX).bind('\\0mine'))", says="refused"),
    bash("leaves limits and traps", "ulimit -t 1; ulimit -n 4; umask 777; trap 'exit 9' EXIT; alias python=false; cd /; exit 0", EXIT, SIGNAL),
)  # fmt: skip

FORGERIES = (
    python("writes a result to every descriptor", "frame = b'{\"reason\": \"exit\", \"exit_code\": 0, \"stdout\": \"FORGED\"}'\nfor fd in range(3, 1024):\n  try: os.write(fd, struct.pack('<I', len(frame)) + frame); print('ESCAPED', fd)\n  except OSError: pass\nsys.exit(3)", says=""),
    python("prints what looks like a result", "frame = b'{\"reason\": \"time\", \"exit_code\": 9, \"stdout\": \"FORGED\"}'\nos.write(1, struct.pack('<I', len(frame)) + frame)", says=""),
    python("exits with the code of the supervisor", "os._exit(70)", EXIT),
    python("reaches into the frames of the worker", "frame = sys._getframe()\nwhile frame:\n  for value in list(frame.f_locals.values()):\n    for part in (getattr(value, 'channel', None), value):\n      if isinstance(part, socket.socket):\n        attempt(lambda: part.sendall(b'x'))\n  frame = frame.f_back\nprint('tried')", says="tried"),
)  # fmt: skip

COMPILERS = (
    c("includes an endless file", '#include "/dev/zero"\nint main(){}', COMPILE),
    c("includes a secret", '#include "/etc/passwd"\nint main(){}', COMPILE),
    c("is a huge array", "char a[1ull<<40]={1};int main(){}", COMPILE),
    HostileProgram("is a template without end", "template<int n> struct A{ static const long v = A<n+1>::v + A<n+2>::v; };\nint main(){return A<0>::v;}", (COMPILE,), "cpp"),
    c("reads a file by the assembler", '__asm__(".incbin \\"/etc/shadow\\"");\nint main(){}', COMPILE),
)  # fmt: skip

PROGRAMS = (
    *PROCESSES, *MEMORY_USERS, *OUTPUT_WRITERS, *FILES, *NETWORK, *KERNEL, *SIGNALS, *DODGES, *POISONS, *FORGERIES, *COMPILERS,
)  # fmt: skip
