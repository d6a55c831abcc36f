"""REINFORCE with a reward for every digit, through the Tinker SDK: python examples/tinker_digits.py ADDRESS KEY MODEL."""

import sys

import tinker


def main(address: str, key: str, model: str) -> None:
    # or TINKER_BASE_URL and TINKER_API_KEY
    service = tinker.ServiceClient(base_url=address, api_key=key)
    training = service.create_lora_training_client(base_model=model, rank=16).result()
    tokenizer = training.get_tokenizer()
    prompt = tokenizer.encode("Write a digit: ")

    for step in range(10):  # REINFORCE: a reward for every digit
        sampler = training.save_weights_and_get_sampling_client().result()
        params = tinker.SamplingParams(max_tokens=4, temperature=1.0)
        start = tinker.ModelInput.from_ints(prompt)
        samples = sampler.sample(start, num_samples=16, sampling_params=params).result().sequences
        rewards = [sum(letter.isdigit() for letter in tokenizer.decode(sample.tokens)) / 4 for sample in samples]
        baseline = sum(rewards) / len(rewards)
        data = []
        for sample, reward in zip(samples, rewards, strict=True):
            tokens = [*prompt, *sample.tokens]
            pad = [0.0] * (len(prompt) - 1)
            data.append(
                tinker.Datum(
                    model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tokens[1:],
                        "logprobs": [*pad, *sample.logprobs],
                        "advantages": [*pad, *[reward - baseline] * len(sample.tokens)],
                    },
                )
            )
        training.forward_backward(data, "importance_sampling")
        training.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
        print(f"step {step}: reward {baseline:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
