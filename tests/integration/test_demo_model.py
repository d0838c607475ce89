"""The built-in model in bfloat16 against transformers in float32."""

from __future__ import annotations

import numpy as np
import torch
from runner_harness import GREEDY, Harness, make_runner, reference_model

from shared.model_source import resolve_model

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
    """Teacher forcing: both see the same ids, those that our decode steps chose one after another."""
    from tokenizer_service.vocabulary import load_vocabulary

    source = resolve_model("demo")
    encode = load_vocabulary(source).tokenizer.encode
    prompts = {slot: encode(text).ids for slot, text in enumerate(PROMPTS)}
    runner = make_runner(source.path, dtype="bfloat16", num_slots=24, num_blocks_override=400)
    harness = Harness(runner)
    chosen = [harness.start(prompts, GREEDY)]
    for index in range(1, OUTPUT):
        chosen.append(harness.decode(list(prompts), max(map(len, prompts.values())) + index))
    reference = reference_model(source.path)
    clear = wrong = 0
    for slot, prompt in prompts.items():
        ids = [step[slot] for step in chosen]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        top, gap = logits.topk(2).indices[:, 0].numpy(), -np.diff(logits.topk(2).values.numpy())[:, 0]
        clear += int((gap > CLEAR_GAP).sum())
        wrong += int(((top != np.array(ids)) & (gap > CLEAR_GAP)).sum())
    assert clear > 0.8 * len(PROMPTS) * OUTPUT
    assert wrong == 0, f"{wrong} of {clear}"
