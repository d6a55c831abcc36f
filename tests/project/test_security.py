"""What docs/security.md promises of the source: no call that runs data, no secret that is written down, known places that listen."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import yaml
from jinja2.exceptions import SecurityError

from loop.tiny import build_tiny, tiny_tokenizer
from strop.cli import main
from strop.config import ConfigError, GrpoRunConfig, dump_config, load_config
from strop.config.source.interpolation import RESOLVERS
from strop.data.prompt_template import parse_prompt_template
from strop.models.chat_template import ChatTemplate
from strop.problems import Problem
from strop.safety.printable import REDACTED, describe_command, redact_arguments, redact_secrets, redact_yaml
from strop.storage.folder_lock import make_holder
from strop.types import user
from support.source_trees import PACKAGE, dotted, parse_package, walk, without_collecting

ROOT = Path(__file__).parents[2]

# Calls that run what they read, or that open a door: the only files that may have them, each with its reason.
ALLOWED: dict[str, dict[str, str]] = {
    "pickle.loads": {
        "extensions/agents/gateway/process_link.py": "a pair of sockets between the training process and one that it started",
        "generation/vllm/worker.py": "from the engine's own process, over vLLM's channel",
        "generation/vllm/vllm_engine.py": "from the engine's workers, over vLLM's channel",
        "extensions/sglang/server/scheduler_process.py": "from the run that started the server, which alone has its key",
        "extensions/sglang/server/engine_calls.py": "from the server that this process started, on loopback",
        "environments/scoring/scoring_worker.py": "from the process that started it, over a pipe",
        "extensions/recorded/tokenizing_pool.py": "between the run and the process that it started, over its pipes",
    },
    "pickle.load": {"checkpointing/base.py": "state.pt, with a list of classes"},
    "pickle.Unpickler": {
        "checkpointing/base.py": "state.pt, with a list of classes",
        "learner/parallel/shard_files.py": "with a list of classes",
    },
    "torch.load": {
        "checkpointing/base.py": "state.pt, with a list of classes",
        "learner/parallel/single_device.py": "weights_only",
        "models/load_report.py": "weights_only",
        "extensions/labs/draft/draft_trainer.py": "weights_only",
        "extensions/labs/draft/eagle_head.py": "weights_only",
        "extensions/sglang/server/scheduler_process.py": "weights_only, of files that the run has written",
        "extensions/megatron/checkpoint/torch_dist.py": "weights only",
        "learner/parallel/sharded_checkpoint.py": "weights_only",
    },
    "socket.socket": {
        "extensions/agents/gateway/gateway_worker.py": "the descriptor that the training process gave it",
        "extensions/sglang/server_process.py": "asks for a free port of the loopback interface",
        "extensions/adapters/nemo_gym_runner.py": "asks for a free port of the loopback interface",
        "extensions/code/sandbox/sandbox_worker.py": "the descriptor that its caller gave it",
        "extensions/sandboxes/local/local_provider.py": "listeners that a sandbox made in its own network namespace",
        "extensions/sandboxes/local/sandbox_init.py": "the descriptor that its caller gave it",
        "extensions/tasks/inside/kernel.py": "in the sandbox: a socket among its files",
        "weight_sync/transports/connection.py": "abstract Unix socket, the peer's user is checked",
        "weight_sync/transports/broadcast.py": "asks for this machine's address, sends nothing",
    },
    "socket.create_server": {
        "extensions/sandboxes/local/sandbox_init.py": "loopback of the sandbox's own network namespace",
        "extensions/view/view_routes.py": "strop view: loopback unless --host is given, a token unless --no-token",
        "weight_sync/transports/secret_store.py": "one address, a secret per sender",
        "distributed/base.py": "one address",
    },
    "eval": {"extensions/tasks/inside/kernel.py": "in the sandbox: cells of the policy"},
    "exec": {
        "extensions/code/sandbox/sandbox_worker.py": "in the sandbox, after every privilege was given up",
        "extensions/code/programs/candidate.py": "in the sandbox: a policy's program",
        "extensions/code/programs/checker.py": "in the sandbox: the tests of a data set",
        "extensions/tasks/inside/kernel.py": "in the sandbox: cells of the policy",
    },
    "compile": {
        "extensions/code/sandbox/sandbox_worker.py": "in the sandbox, after every privilege was given up",
        "extensions/code/programs/candidate.py": "in the sandbox",
        "extensions/code/programs/checker.py": "in the sandbox",
        "extensions/tasks/inside/kernel.py": "in the sandbox: cells of the policy",
    },
    "os.system": {},
    "os.popen": {},
    "yaml.load": {},
    "joblib.load": {},
    "marshal.loads": {},
    "shelve.open": {},
    "tempfile.mktemp": {},
    "dist.TCPStore": {"distributed/workers/learner_worker.py": "a client"},
    "distributed.TCPStore": {"extensions/checks/preflight.py": "a client", "distributed/base.py": "on a socket of one address"},
    "web.TCPSite": {
        "safety/http_server.py": "in listening",
        "extensions/adapters/nemo_gym_runner.py": "NeMo-Gym's host, with the random id of a rollout",
    },
    "web.SockSite": {"safety/http_server.py": "in listening"},
    "listening": {
        "extensions/serve/serve_model.py": "strop serve: loopback unless --host is given",
        "extensions/code/sandbox/sandbox_server.py": "strop sandbox serve: loopback unless --host is given, always with a key",
        "extensions/agents/gateway/gateway_server.py": "for agents: loopback unless gateway.host is set, and a key for each episode",
        "extensions/view/view_routes.py": "strop view: loopback unless --host is given, a token unless --no-token",
    },
}


@cache
def calls() -> tuple[tuple[str, str, Mapping[str, str]], ...]:
    """Every call of Strop's code: file, function and the options that are given by name."""
    with without_collecting():
        return tuple(
            (str(path.relative_to(PACKAGE)), dotted(node.func), {str(each.arg): dotted(each.value) for each in node.keywords})
            for path, tree in parse_package().items()
            for node in walk(tree)
            if isinstance(node, ast.Call)
        )


def test_calls_that_run_data_or_listen_are_where_they_are_known() -> None:
    found = {(name, file) for file, name, _ in calls() if name in ALLOWED}
    known = {(name, file) for name, files in ALLOWED.items() for file in files}
    assert {pair for pair in found if pair not in known} == set()


def test_no_call_allows_pickled_objects_or_a_shell() -> None:
    for file, name, options in calls():
        assert options.get("shell", "False") == "False", (file, name)
        assert options.get("allow_pickle", "False") == "False", (file, name)
        if name == "torch.load" and file != "checkpointing/base.py":
            assert options.get("weights_only") == "True", file
        brings_code = "PeftModel" not in name and not name.startswith("GenerationConfig.")  # the latter has values alone
        brings_code &= "_model_mapping" not in name  # a class of Transformers itself, which is given no folder
        if name.endswith(".from_pretrained") and file.startswith("models/") and brings_code:
            assert "trust_remote_code" in options or "peft" in name.lower(), (file, name)


def test_secrets_in_env_vars_are_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", "from-the-environment")
    overrides = [
        "policy.model_name=m",
        "data.train.env_name=arithmetic",
        "cluster.roles.learner.env_vars.HF_TOKEN=${env:A_TOKEN}",
        "cluster.roles.learner.env_vars.AWS_SECRET_ACCESS_KEY=hidden",
        "cluster.roles.learner.env_vars.NCCL_DEBUG=INFO",
    ]
    config = load_config(None, overrides, root=GrpoRunConfig, check=False).config
    assert config.cluster.roles.learner.env_vars["HF_TOKEN"] == "from-the-environment"
    text = dump_config(config)
    assert "from-the-environment" not in text and "hidden" not in text
    assert text.count(REDACTED) == 3 and "NCCL_DEBUG" in text and "INFO" not in text
    assert redact_arguments(["strop", "grpo", *overrides])[-3:] == [
        f"cluster.roles.learner.env_vars.HF_TOKEN={REDACTED}",
        f"cluster.roles.learner.env_vars.AWS_SECRET_ACCESS_KEY={REDACTED}",
        f"cluster.roles.learner.env_vars.NCCL_DEBUG={REDACTED}",
    ]


SECRETS = (
    "WANDB_KEY", "PRIVATE_KEY", "HF_AUTH", "GH_PAT", "PGPASS", "PASSPHRASE", "BEARER", "COOKIE", "DATABASE_URL", "X", "lower", "HF_TOKEN"
)  # fmt: skip
LOGINS = (
    "http://user:s3cr3t@host:8900", "https://s3cr3t@github.com/a/b", "postgresql://u:s3cr3t@db/x?y=1", "http://u:p@s3cr3t@h",
    "HTTPS://:s3cr3t@h",
)  # fmt: skip


def test_no_variable_and_no_login_of_a_url_is_left_in_settings_texts_and_commands() -> None:
    values = {
        "cluster": {
            "roles": {"engine": {"env_vars": {name: f"s3cr3t-{name}" for name in SECRETS}}},
            "list": [{"env_vars": {"A": ["s3cr3t"]}}],
        },
        "sandbox": {"url": list(LOGINS)},
        "note": f"see {LOGINS[0]} and {LOGINS[1]}",
        "kept": "http://host:80/path@v1 a@b.c git@host:x",
    }
    found = redact_secrets(values)
    assert "s3cr3t" not in repr(found) and found["kept"] == values["kept"] and redact_secrets(found) == found
    for flow in (False, True, None):
        assert "s3cr3t" not in redact_yaml(yaml.safe_dump(values, default_flow_style=flow)), flow
    block = "a:\n  env_vars:\n    KEY: |-\n      s3cr3t: line\n      s3cr3t\n\n      s3cr3t\n    B: s3cr3t\n  other: kept\n"
    assert redact_yaml(block).count("s3cr3t") == 0 and "other: kept" in redact_yaml(block) and "KEY" in redact_yaml(block)
    words = [f"sandbox.url={LOGINS[0]}", "x={env_vars: {A: s3cr3t}}", "a.env_vars={A: s3cr3t}", *LOGINS, "--config", "a.yaml"]
    assert "s3cr3t" not in " ".join(redact_arguments(words)) and redact_arguments(words)[-2:] == words[-2:]
    assert "s3cr3t" not in str(Problem("sandbox.url", f"found {LOGINS[0]}", f"not {LOGINS[1]}"))


def test_a_configuration_whose_secrets_were_left_out_is_not_started_with_what_stands_for_them(tmp_path: Path) -> None:
    overrides = [
        "policy.model_name=m",
        "data.train.env_name=arithmetic",
        "env.arithmetic={}",
        "cluster.roles.learner.env_vars.LEVEL=info",
    ]
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(load_config(None, overrides, root=GrpoRunConfig, check=False).config))
    with pytest.raises(
        ConfigError, match=r"cluster\.roles\.learner\.env_vars\.LEVEL: found <redacted>: the files of a run leave out"
    ):
        load_config(path, root=GrpoRunConfig)
    load_config(path, root=GrpoRunConfig, check=False)
    load_config(path, ["cluster.roles.learner.env_vars.LEVEL=info"], root=GrpoRunConfig)


@pytest.mark.slow
def test_no_file_of_a_run_holds_a_variable_or_the_login_of_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = build_tiny(tmp_path / "model")
    words = [
        "grpo", f"policy.model_name={model}", "policy.max_total_sequence_length=96", "policy.precision=float32", "policy.device=cpu",
        "policy.train_global_batch_size=4", "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.max_num_steps=2",
        "data.train.env_name=arithmetic", "env.arithmetic={}", "policy.generation.backend=torch", "checkpointing.enabled=true",
        f"checkpointing.checkpoint_dir={tmp_path}/results", "checkpointing.save_period=1", f"logger.log_dir={tmp_path}/logs",
        "logger.tensorboard_enabled=true", f"sandbox.url={LOGINS[0]}", "grpo.val_period=0", "policy.num_threads=1",
        *(f"cluster.roles.learner.env_vars.{name}=s3cr3t{index}" for index, name in enumerate(SECRETS)),
    ]  # fmt: skip
    monkeypatch.setenv("STROP_SANDBOX_API_KEY", "key")
    for more in ((), ("grpo.max_num_steps=3", "cluster.roles.learner.env_vars.X=s3cr3t-changed")):
        monkeypatch.setattr(sys, "argv", ["strop", *words, *more])
        assert main([*words, *more]) == 0
    said = capsys.readouterr()
    assert "s3cr3t" not in said.out + said.err
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "logs"), "--output", str(page)]) == 0
    files = [path for folder in ("logs", "results") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in (*files, page):
        assert b"s3cr3t" not in path.read_bytes(), path


def test_the_lock_of_a_folder_names_the_command_without_its_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["grpo", "cluster.roles.learner.env_vars.HF_TOKEN=hidden", "run_name=a b"]
    monkeypatch.setattr("sys.argv", ["/somewhere/src/strop/__main__.py", *words])
    said = f"python -m strop grpo 'cluster.roles.learner.env_vars.HF_TOKEN={REDACTED}' 'run_name=a b'"
    assert make_holder().command == describe_command() == said
    monkeypatch.setattr(sys, "argv", ["examples/quickstart.py", "grpo.seed=2"])
    assert describe_command() == "python examples/quickstart.py grpo.seed=2"


def test_a_chat_template_runs_in_a_sandbox() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ ''.__class__.__mro__[1].__subclasses__() }}{{ messages }}"
    with pytest.raises(SecurityError):
        ChatTemplate(tokenizer).encode_prompt((user("hi"),))


def test_a_prompt_file_is_text_and_no_format_string() -> None:
    template = parse_prompt_template("{question.__class__} {0.__init__} {question}", "p")
    assert template.render("hi")[0].content == "{question.__class__} {0.__init__} hi"


def test_an_interpolation_runs_no_code() -> None:
    assert sorted(RESOLVERS) == ["add", "div", "env", "max", "min", "mul", "sub"]


LISTENERS = """
import os, socket
from strop.weight_sync.transports.broadcast import BroadcastSender
from strop.weight_sync.transports.host_memory import MemorySender
from strop.distributed.base import serve_store
from strop.environments.scoring.scoring_pool import get_scoring_pool
kept = BroadcastSender(1), MemorySender(1), serve_store("127.0.0.1", 2, 5), get_scoring_pool(1)
inodes = {os.readlink(f"/proc/self/fd/{fd}")[8:-1] for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")
          and os.path.exists(f"/proc/self/fd/{fd}") and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")}
for family in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{family}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            print(family, fields[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_everything_of_strop_that_listens_in_one_process_listens_on_loopback(interpreter: str) -> None:
    outcome = subprocess.run([interpreter, "-c", LISTENERS], capture_output=True, text=True, timeout=100, env=os.environ)
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.split("\n")[:-1]
    assert len(lines) == 2 and all(line.startswith("tcp 0100007F:") for line in lines), lines


def test_the_page_names_every_place_that_listens() -> None:
    page = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    for name in ("socket.create_server", "socket.socket", "listening"):
        for file in ALLOWED[name]:
            assert f"src/strop/{file}" in page, f"docs/security.md does not name {file}"
    assert not re.search(r"\bTODO\b", page)
