"""The built-in model in bfloat16 against transformers in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from runner_harness import GREEDY, Harness, make_runner, reference_model

from shared.model_source import resolve_model
from tokenizer_service.vocabulary import load_vocabulary

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "The three primary colors are",
    "Dear Sir or Madam,\n\nI am writing to",
    "To make a good cup of tea, first",
    "In 1969, the first human",
    "The largest planet in the solar system",
    "My favourite season is autumn because",
    "A triangle with sides 3, 4 and 5",
    "Photosynthesis is the process by which",
    "import numpy as np\n\n",
    "The old clock in the hall struck",
    "Shakespeare wrote",
    "Q: What is 7 times 8?\nA:",
    "The weather forecast for tomorrow",
    "<|im_start|>user\nName three fruits.<|im_end|>\n<|im_start|>assistant\n",
    "List of countries in Europe:\n1.",
    "When the train finally arrived,",
]
OUTPUT, CLEAR_GAP = 64, 0.1


def test_top_token_is_the_reference_one_wherever_its_lead_is_clear() -> None:
    """Teacher forcing: the reference's own greedy ids go through our decode steps, 20 requests in a batch."""
    source = resolve_model("demo")
    encode = load_vocabulary(source).tokenizer.encode
    prompts = {slot: encode(text).ids for slot, text in enumerate(PROMPTS)}
    teacher = greedy_batch(source.path, list(prompts.values()))
    chosen = forced_decode(source.path, prompts, teacher)
    clear = wrong = 0
    for slot, prompt in prompts.items():
        with torch.inference_mode():
            ids = torch.tensor([prompt + teacher[slot]])
            logits = reference_model(source.path)(ids).logits[0, len(prompt) - 1 : -1]
        values, indices = logits.topk(2)
        is_clear = (values[:, 0] - values[:, 1] > CLEAR_GAP).numpy()
        clear += int(is_clear.sum())
        wrong += int(((indices[:, 0].numpy() != chosen[:, slot]) & is_clear).sum())
    assert clear > 0.8 * len(PROMPTS) * OUTPUT
    assert wrong == 0, f"{wrong} of {clear}"


def greedy_batch(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """``OUTPUT`` greedy ids of transformers for each prompt, all in one left-padded batch."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        output = reference_model(model).generate(
            ids, attention_mask=mask, max_new_tokens=OUTPUT, min_new_tokens=OUTPUT, do_sample=False, pad_token_id=0
        )
    continued: list[list[int]] = output[:, longest:].tolist()
    return continued


def forced_decode(model: Path, prompts: dict[int, list[int]], teacher: list[list[int]]) -> np.ndarray:
    """[OUTPUT, slots] the id that our runner chooses at each position when all ids before it are the teacher's."""
    runner = make_runner(model, dtype="auto", num_slots=24, num_blocks_override=400)
    assert runner.cache.tensor.dtype == torch.bfloat16
    harness = Harness(runner)
    chosen = [harness.start(prompts, GREEDY)]
    for index in range(1, OUTPUT):
        for slot, prompt in prompts.items():
            runner.state.token_ids[slot * runner.max_model_len + len(prompt) + index - 1] = teacher[slot][index - 1]
        chosen.append(harness.decode(list(prompts), max(map(len, prompts.values())) + index))
    return np.array(chosen)
