"""Beam searches beside ordinary requests on the runner of the GPU: what transformers finds, and the scores of it."""

from __future__ import annotations

import pytest
import torch
from cuda_harness import ON_GPU, Job, Stack, ids_of, make_cuda_runner
from runner_harness import beam_search, reference_model
from tiny_models import TinyModels

from shared.logprobs import unpack
from shared.sampling import SamplingParams

WIDTH, END = 3, 2
OUTPUT = 24 if ON_GPU else 3
LENGTHS = (5, 16, 18, 33) if ON_GPU else (18,)
"""Of the prompts: with a block of 16 that is partly filled where beams begin, and with whole ones."""


def test_searches_beside_others(tiny_models: TinyModels, device: torch.device) -> None:
    folder = tiny_models.folder("qwen3")
    runner = make_cuda_runner(folder, num_slots=14, num_blocks=60, max_model_len=64)
    search = SamplingParams(
        n=WIDTH,
        beam_width=WIDTH,
        temperature=0.0,
        max_tokens=OUTPUT,
        ignore_eos=True,
        stop_token_ids=[END],
        logprobs=2,
    )
    plain = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    prompts = [[(37 * index + 11 * length) % 300 + 20 for index in range(length)] for length in LENGTHS]
    jobs = [Job(prompt, search) for prompt in prompts] + [Job(prompt[:7], plain) for prompt in prompts]
    stack = Stack(runner, max_num_seqs=12)
    answers = stack.run(jobs)
    reference = reference_model(folder)
    for number, prompt in enumerate(prompts):
        found = answers[WIDTH * number : WIDTH * (number + 1)]
        rows = beam_search(reference, prompt, WIDTH, OUTPUT, eos_token_id=END)[:, len(prompt) :].tolist()
        assert ids_of(found) == [row[: row.index(END) + 1] if END in row else row for row in rows]
        for answer in found:
            with torch.no_grad():
                logits = reference(torch.tensor([prompt + answer.ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(answer.ids)), answer.ids].tolist()
            assert [unpack(record).token.logprob for record in answer.records] == pytest.approx(logprobs, abs=1e-4)
            assert all(len(unpack(record).top) == 2 for record in answer.records)
    if ON_GPU:  # the interpreter takes half a minute
        alone = Stack(runner, max_num_seqs=12).run(jobs[len(prompts) :])
        assert ids_of(answers[WIDTH * len(prompts) :]) == ids_of(alone)
