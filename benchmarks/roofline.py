"""Where the time of a micro-batch goes on one GPU, by arithmetic: forward and backward, by kind of kernel.

    python benchmarks/roofline.py            # the table that docs/performance.md speaks of
    python benchmarks/roofline.py --host 10  # microseconds that the host takes for a launch

Each kind takes the longer of its arithmetic and its memory traffic, at the rates below; nothing overlaps, but the host with all of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from strop.extensions.performance.devices import DecoderDimensions, PassCounts, device_named, dimensions_of, training_flops

PRODUCTS = 700e12  # FLOP/s of large products in bfloat16
ATTENTION = {"FlashAttention 2": 223e12, "cuDNN": 451e12}  # FLOP/s both ways
BANDWIDTH = 3.5e12  # bytes/s
LINK = 300e9  # bytes/s of a gather between GPUs
LAUNCHES = 157  # per layer and micro-batch
HOST = 39e-6  # s for a launch: 171 ms for 4,390
PEAK = device_named("H200").peak_flops("bfloat16")
TOKENS = (2_048, 16_384, 65_536)

MODELS: Mapping[str, Mapping[str, Any]] = {
    "1.5B": {"model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2,
             "intermediate_size": 8960, "vocab_size": 151_936, "tie_word_embeddings": True},
    "8B": {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14_336, "vocab_size": 128_256, "tie_word_embeddings": False},
    "30B-A3B": {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
                "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
                "intermediate_size": 6144, "vocab_size": 151_936, "tie_word_embeddings": False},
}  # fmt: skip


@dataclass(frozen=True)
class Roofline:
    """Seconds of a micro-batch of one sequence of ``tokens``, all of them predicted."""

    model: DecoderDimensions
    values: Mapping[str, Any]
    tokens: int

    @property
    def layers(self) -> float:
        """The layers' products. Experts that few tokens reach take the time of reading their weights and writing the gradients."""
        flops = 6.0 * self.tokens * sum(each.attention + each.mlp for each in self.model.layers)
        weights = sum(each.attention + each.resident for each in self.model.layers)
        return max(flops / PRODUCTS, weights * (2 + 2 + 4) / BANDWIDTH)

    @property
    def output(self) -> float:
        """Four products, as logits are computed again, and the logits written and read once for each of three passes."""
        columns = self.model.vocabulary
        return 8.0 * self.tokens * self.model.hidden * columns / PRODUCTS + self.tokens * columns * 2 * 6 / BANDWIDTH

    def attention(self, rate: float) -> float:
        """Seven products of half the pairs: two forward, five backward, which recompute the scores."""
        pairs = self.tokens * (self.tokens + 1) / 2
        return sum(7 * pairs * (each.query_width + each.value_width) for each in self.model.layers) / rate

    @property
    def elementwise(self) -> float:
        """Norms, residuals, rotary embeddings, activations: each tensor read and written once forward, twice backward."""
        first = self.model.layers[0]
        width = self.values.get("moe_intermediate_size", 0) * self.values.get("num_experts_per_tok", 0)
        numbers = (
            10 * self.model.hidden
            + 2 * (first.query_width + first.cache_width / 2)
            + 3 * (width or self.values["intermediate_size"])
        )
        routed = 4 * self.values.get("num_experts_per_tok", 0) * self.model.hidden  # sorted, and added again
        return 3 * 2 * (numbers + routed) * self.tokens * len(self.model.layers) / BANDWIDTH

    @property
    def weights(self) -> float:
        """Casts of float32 weights, and float32 gradients added to those of earlier micro-batches."""
        return self.model.parameters * (4 + 2 + 2 + 4 + 4) / BANDWIDTH

    @property
    def gathers(self) -> float:
        """Two gathers in bfloat16 and a reduction in float32, of a model on several GPUs."""
        return self.model.parameters * (2 + 2 + 4) / LINK

    @property
    def flops(self) -> float:
        pairs = self.tokens * (self.tokens + 1) // 2
        return training_flops(self.model, PassCounts(read=self.tokens, predicted=self.tokens, pairs={None: pairs}))

    def kernels(self, attention: str) -> float:
        return self.layers + self.output + self.attention(ATTENTION[attention]) + self.elementwise + self.weights


def rows(host: float) -> Iterator[tuple[str, ...]]:
    for name, values in MODELS.items():
        model = dimensions_of(values)
        for tokens in TOKENS:
            line = Roofline(model, values, tokens)
            parts = [
                line.layers,
                line.output,
                *(line.attention(rate) for rate in ATTENTION.values()),
                line.elementwise,
                line.weights,
            ]
            waits = host * LAUNCHES * len(model.layers)
            reached = [line.flops / PEAK / seconds for seconds in map(line.kernels, ATTENTION)]
            today = line.flops / PEAK / max(waits, line.kernels("FlashAttention 2"))
            yield (
                name,
                f"{tokens:,}",
                *(f"{1000 * part:,.0f}" for part in parts),
                f"{1000 * waits:,.0f}",
                *(f"{share:.0%}".replace("%", " %") for share in (*reached, today)),
                f"{1000 * line.gathers:,.0f}",
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", type=float, default=HOST * 1e6, help="microseconds that the host takes for a launch")
    host = parser.parse_args().host * 1e-6
    heads = ("model", "tokens", "layers", "output layer", "attention, FA2", "cuDNN", "elementwise", "weights", "host")
    heads += ("MFU of the kernels, FA2", "cuDNN", "with the host, FA2", "gathers")
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for row in rows(host):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
