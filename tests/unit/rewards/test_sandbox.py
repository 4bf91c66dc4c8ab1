"""What a program cannot do or use up: sockets, processes, files, signals, time, memory, output."""

import platform
import re
import sys
import sysconfig
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hfdist.errors import ConfigError
from hfdist.rewards import Generation, load_rewards
from hfdist.rewards.sandbox.start import SandboxLimits, count_passed
from hfdist.tune.choose import check_rewards

# Each gives what it finds: a denied call gives its errno.
TRIES = """
import ctypes, errno, fcntl, os, signal, socket, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
def called(result):
    if result == -1: raise OSError(ctypes.get_errno(), "")
tries = {
    "a connection": lambda: socket.create_connection(("127.0.0.1", 9)),
    "a socket": lambda: socket.socket(),
    "a socket of the machine": lambda: socket.socket(socket.AF_UNIX),
    "a pair of sockets": lambda: socket.socketpair(),
    "io_uring": lambda: called(libc.syscall(425, 8, bytes(120))),
    "a process": os.fork,
    "a process by clone": lambda: called(libc.syscall(56, 17, 0, 0, 0, 0)),
    "a process by clone3": lambda: called(libc.syscall(435, bytes(88), 88)),
    "another program": lambda: os.execv("/bin/true", ["true"]),
    "a signal": lambda: os.kill(os.getppid(), 0),
    "a signal to its group": lambda: os.killpg(0, 0),
    "a signal from a file": lambda: fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid()),
    "the limits of another": lambda: called(libc.syscall(302, os.getppid(), 0, 0, bytes(16))),
    "the memory of another": lambda: called(libc.syscall(310, os.getppid(), 0, 0, 0, 0, 0)),
    "tracing": lambda: called(libc.ptrace(16, os.getppid(), 0, 0)),
    "another group": lambda: os.setpgid(0, 0),
    "another session": os.setsid,
    "shared memory": lambda: called(libc.syscall(29, 77, 4096, 0o1600)),
    "memory as a file": lambda: os.memfd_create("memory"),
    "a new file": lambda: open("/tmp/rewards-new", "x"),
    "a file by O_CREAT alone": lambda: os.open("/tmp/rewards-new", os.O_CREAT),
    "a file without a name": lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR),
    "a file to change": lambda: open("/dev/null", "r+"),
    "a file to cut": lambda: os.open("/dev/null", os.O_TRUNC),
    "a file by openat2": lambda: called(libc.syscall(437, -100, b"/tmp/x", b"\\x42" + bytes(23), 24)),
    "a folder": lambda: os.mkdir("/tmp/rewards-new"),
    "a link": lambda: os.symlink("/", "/tmp/rewards-new"),
    "another mode": lambda: os.chmod("/tmp", 0o1777),
    "a folder above": lambda: os.chdir("/tmp"),
    "a namespace": lambda: called(libc.unshare(0x10000000)),
    "a dump": lambda: called(libc.prctl(4, 1, 0, 0, 0)),
    "more memory": lambda: __import__("resource").setrlimit(9, (2**40, 2**40)),
}
def attempt(name):
    try: tries[name]()
    except OSError as error: return error.errno
    except ValueError as error: return str(error)
    return "done"
def start_thread():
    try: threading.Thread(target=int).start()
    except RuntimeError as error: return str(error)
"""
NAMES = [line.split('"')[1] for line in TRIES.splitlines() if line.startswith('    "')]


def outcomes(program, tests, **limits):
    """Which tests pass; each is run alone, since only their number is known."""
    return {test: bool(count_passed(program, f"assert {test}", 1, SandboxLimits(**limits))) for test in tests}


@pytest.fixture
def python_with(tmp_path, monkeypatch):
    """Has the sandbox do something before it begins."""

    def install(first):
        python = tmp_path / "python"
        begin = f"#!{sys.executable} -IS\nimport runpy, sys\ndel sys.argv[:4]\nsys.path.insert(0, sys.argv[0])\n"
        python.write_text(f"{begin}{first}\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))

    return install


NO_LANDLOCK = "import confinement; confinement._read_only_libraries = lambda: False"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="some calls are made by their numbers there")
@pytest.mark.parametrize("first", ["", NO_LANDLOCK], ids=["", "without Landlock"])
def test_system_calls_are_denied(first, python_with):
    python_with(first)
    denied = "in (1, 13, 38, 'not allowed to raise maximum limit')"  # EPERM, EACCES, ENOSYS
    reference = "\n".join(f"assert attempt({name!r}) {denied}" for name in NAMES)
    passed = count_passed(TRIES, reference, len(NAMES), SandboxLimits(), without_landlock=bool(first))
    assert passed == len(NAMES) == 32, outcomes(TRIES, reference.replace("assert ", "").splitlines())


def test_no_threads():
    assert count_passed(TRIES, 'assert start_thread() == "can\'t start new thread"', 1, SandboxLimits()) == 1


READS = """
def read(path):
    try: return len(open(path, "rb").read(9))
    except OSError as error: return error.errno
def library():
    import decimal, sqlite3, zoneinfo
    return str(decimal.Decimal(1) / 4)
"""


def test_only_libraries_are_read(tmp_path):
    """In the folder of packages of the Python that runs, of the Python below it, and of the system."""
    (tmp_path / "secret").write_text("secret")
    paths = [str(tmp_path / "secret"), "/etc/passwd", "/proc/self/environ", __file__]
    base = sysconfig.get_paths(vars={"base": sys.base_prefix, "platbase": sys.base_prefix})["purelib"]
    packages = [base, sysconfig.get_path("purelib"), "/usr/lib/python3/dist-packages"]
    paths += [str(next(Path(folder).glob("*/__init__.py"))) for folder in packages if Path(folder).is_dir()]
    assert len(paths) > 5
    reference = "\n".join([f"assert read({path!r}) == 13" for path in paths] + ["assert library() == '0.25'"])
    assert count_passed(READS, reference, len(paths) + 1, SandboxLimits()) == len(paths) + 1


def test_without_landlock_the_tests_stay_unseen(python_with):
    python_with(NO_LANDLOCK)
    program = """
        import os
        def look(name):
            try: open(f"/proc/{os.getppid()}/{name}", "rb").read(1)
            except OSError as error: return error.errno
    """
    reference = "\n".join(f"assert look({name!r}) == 13" for name in ("mem", "environ", "maps", "fd/0"))
    assert count_passed(textwrap.dedent(program), reference, 4, SandboxLimits(), without_landlock=True) == 4


def test_without_landlock_no_program_runs_unless_asked(python_with):
    python_with(NO_LANDLOCK)
    one = Generation(prompt="", text=READS, reference="assert read('/etc/passwd') == 9")
    with pytest.raises(ConfigError, match="cannot confine a program") as caught:
        check_rewards({"code": 1.0})
    assert "no Landlock" in caught.value.found
    [name] = re.findall("reward `(code_.*)` runs", caught.value.hint)
    check_rewards({name: 1.0})
    [reward] = load_rewards({name: 1.0})
    assert reward([one]) == [1.0]


def test_it_has_no_environment_and_no_arguments():
    # Python itself sets its locale.
    program = "import os, sys\ndef seen(): return dict(os.environ), sys.argv[4:], os.getcwd()"
    assert count_passed(program, "assert seen() == ({'LC_CTYPE': 'C.UTF-8'}, [], '/')", 1, SandboxLimits()) == 1


@pytest.mark.parametrize(
    ("slow", "limits"),
    [
        ("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)", {"wall_seconds": 0.8}),
        (
            "import re, signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN); re.match('(a*)*b', 'a' * 99)",
            {"cpu_seconds": 1, "wall_seconds": 40.0},
        ),
    ],
)
def test_time_ends_and_earlier_tests_count(slow, limits):
    program = f"def f(x):\n    if x > 1: {slow}\n    return x"
    begin = time.monotonic()
    assert (
        count_passed(program, "assert f(1) == 1\nassert f(2) == 2\nassert f(1) == 1", 3, SandboxLimits(**limits)) == 1
    )
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    "program",
    [
        "def f(x): return len(bytearray(2**30)) and x",
        "def f(x): return 'a' * 2**24",
        "def f(x): return f(x)",
        "def f(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
        "def f(x):\n    import sys\n    sys.stdout.write('x' * 2**26); sys.stderr.write('x' * 2**26)\n    return 0",
        "def f(x):\n    import ctypes\n    ctypes.string_at(0)",
        "def f(x):\n    import os\n    while True: os.write(4, b'x' * 2**20)",
    ],
)
def test_too_much_is_a_failed_test(program):
    assert count_passed(program, "assert f(1) == 1", 1, SandboxLimits(cpu_seconds=2, wall_seconds=4.0)) == 0


def test_printing_costs_no_test():
    program = "def f(x):\n    print('x' * 2**24)\n    return x"
    assert count_passed(program, "print('+')\nassert f(1) == 1\nassert f(2) == 1", 2, SandboxLimits()) == 1


def test_the_sandbox_ends_with_the_process_that_has_started_it():
    starter = """
        from hfdist.rewards.sandbox.start import SandboxLimits, count_passed
        count_passed("import time; time.sleep(60)", "assert f(1) == 1", 1, SandboxLimits(wall_seconds=60.0))
    """
    process = psutil.Popen([sys.executable, "-c", textwrap.dedent(starter)])
    end = time.monotonic() + 20
    while len(children := process.children(recursive=True)) < 2 and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.2)  # they ask for the signal just after they start
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert len(children) == 2
    assert not alive


@pytest.mark.parametrize(
    ("first", "found"),
    [
        ("import platform; platform.machine = lambda: 'riscv64'", "linux on riscv64 has no filter of system calls"),
        ("import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (7, 7))", "Too many open files"),
        ("sys.exit()", "no start within 12.0 s"),
    ],
)
def test_a_machine_that_cannot_confine_is_said(first, found, python_with):
    python_with(first)
    with pytest.raises(ConfigError, match="cannot confine a program") as caught:
        count_passed("", "assert True", 1, SandboxLimits())
    assert found in str(caught.value.found)
