"""The site's own search finds the right page first: its worker runs in Node on the index of a site built here."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from mkdocs.commands.build import build
from mkdocs.config import load_config

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# What a newcomer types, and the pages that answer it.
QUESTIONS = {
    "wandb": "tracking",
    "tensorboard": "tracking",
    "slurm": "guides/cluster_run",
    "docker": "guides/cluster_run install",
    "quantization": "fp8",
    "flash attention": "performance",
    "LoRA rank": "lora",
    "export to huggingface": "guides/evaluate_export_serve",
    "evaluate": "guides/evaluate_export_serve evaluation",
    "multi turn": "guides/multi_turn",
    "tool calling": "tools",
    "reward hacking": "reward_hacking",
    "gradient accumulation": "guides/coming_from training",
    "new algorithm": "algorithms/custom",
    "max_completion_length": "guides/coming_from",
    "num_generations": "guides/coming_from",
    "container": "guides/cluster_run",
    "eval during training": "evaluation",
    "out of memory": "troubleshooting",
    "gpu memory": "troubleshooting planning",
    "vllm": "generation",
    "resume": "checkpoints",
    "resume from checkpoint": "checkpoints",
    "transformer engine": "megatron install",
    "learning rate": "training",
    "learning rate sweep": "checkpoints",
    "push to hub": "guides/evaluate_export_serve",
    "beta": "algorithms/parts",
    "KL penalty": "algorithms/parts",
    "batch size": "training",
    "system prompt": "guides/own_data",
    "seed": "generation checkpoints",
    "token limit": "guides/model",
    "own reward function": "guides/own_data",
    "early stopping": "training",
    "chat template": "guides/model",
    "custom loss": "algorithms/custom",
    "custom environment": "environments",
    "multi node": "guides/cluster_run",
    "CUDA version": "install",
    "merge adapter": "guides/evaluate_export_serve lora",
    "sweep": "checkpoints",
    "NCCL": "guides/cluster_run",
    "QLoRA": "lora",
    "jupyter": "python",
    "ModuleNotFoundError": "install",
    "reward does not increase": "guides/flat_reward",
    "loss is nan": "troubleshooting",
    "reward model": "algorithms/supervised verifiers",
    "ppo critic": "algorithms/critics",
    "dpo data format": "recorded_data",
    "mcp server": "tools",
    "asynchronous training": "training",
    "MoE load balancing": "experts",
    "will it fit in memory": "planning",
    "kubernetes": "cluster",
    "run hangs": "operations",
    "look at completions": "view",
    "AIME": "evaluation",
    "coming from verl": "guides/coming_from",
}
ASK = """
const fs = require("fs"), vm = require("vm");
const [site, questions] = [process.argv[1], JSON.parse(process.argv[2])];
const workers = `${site}/assets/javascripts/workers/`;
const worker = fs.readFileSync(workers + fs.readdirSync(workers).find((name) => name.endsWith(".js")), "utf8");
let heed, reply;
const scope = {console, addEventListener: (_, listener) => { heed = listener; }, postMessage: (message) => reply(message)};
vm.runInNewContext(worker, Object.assign(scope, {self: scope}));
const ask = (type, data) => new Promise((resolve) => { reply = resolve; heed({data: {type, data}}); });
(async () => {
  await ask(0, {...JSON.parse(fs.readFileSync(`${site}/search/search_index.json`, "utf8")), options: {suggest: false}});
  const first = {};
  for (const question of questions) first[question] = (await ask(2, question)).data.items[0]?.[0].location;
  console.log(JSON.stringify(first));
})();
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site without the API's pages, which the search leaves out."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), plugins=["search"]))
    return folder


def test_the_right_page_is_found_first(site: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("needs Node, which `make setup-sandbox` installs")
    done = subprocess.run(["node", "-e", ASK, str(site), json.dumps(list(QUESTIONS))], capture_output=True, text=True, check=True)
    first = {question: str(page).partition("#")[0].removesuffix(".html") for question, page in json.loads(done.stdout).items()}
    missed = {question: first[question] for question, pages in QUESTIONS.items() if first[question] not in pages.split()}
    assert len(QUESTIONS) == 60 and len(missed) <= 5, missed


def test_log_and_api_are_not_searched_and_search_words_are_of_pages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in index}
    assert not [page for page in found if page.startswith(("log/", "api/"))] and len(found) > 50
    words = yaml.safe_load((ROOT / "docs" / "search_words.yml").read_text())
    assert not [page for page in words if not (ROOT / "docs" / page).is_file()]
