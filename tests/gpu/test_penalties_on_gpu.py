"""Penalties see the tokens that they should, however a request was scheduled (OpenAI's and transformers' formulas)."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cuda_harness import ON_GPU, Answer, Job, Stack, ids_of, make_cuda_runner
from tiny_models import TinyModels

from gpu_worker.kernels.sampling_constraints import constrain
from shared.messages import Step
from shared.sampling import SamplingParams
from tests.kernels.sampling_pair import State, make_logits, make_request

OUTPUT = 20 if ON_GPU else 4
PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.5},
    {"repetition_penalty": 1.3, "presence_penalty": -0.7, "frequency_penalty": 1.1},
]
WORD = 77
PROMPT = [*range(30, 60), WORD, WORD, WORD]


def penalised(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Any:
    """The formula, in float64; repetition sees prompt and output, the others the output alone."""
    result = logits.double().clone()
    for token in {*prompt, *output}:
        value, factor = result[token], params.repetition_penalty
        result[token] = value / factor if value > 0 else value * factor
    for token, count in Counter(output).items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    return result


@pytest.mark.parametrize("penalties", [*PENALTIES, {}], ids=str)
def test_logits_are_those_of_the_formula(device: torch.device, penalties: dict[str, float]) -> None:
    from gpu_worker.sampling.cuda_sampler import CudaSampler

    vocab_size, slots, longest = (5000, 40, 2100) if ON_GPU else (300, 4, 60)
    sampler = CudaSampler(slots, vocab_size, None, device)
    requests = [make_request(slot, temperature=0.0, **penalties) for slot in range(slots)]
    sampler.add(requests)
    generator = torch.Generator().manual_seed(4)
    token_ids = torch.randint(0, vocab_size // 2, (slots + 1, longest), dtype=torch.int32, generator=generator)
    lengths = torch.randint(3, longest, (slots + 1,), dtype=torch.int32, generator=generator)
    token_ids[:, :3] = WORD
    prompts = (lengths * torch.rand(slots + 1, generator=generator)).int().clamp_min_(1)
    state = State(token_ids.to(device), lengths.to(device), prompts.to(device))
    logits = make_logits(slots, vocab_size, 3)
    changed = logits.clone().to(device)
    rows = torch.arange(slots, dtype=torch.int32, device=device)
    constrain(changed, rows, sampler.params.records, sampler.params.arena_address, *state, vocab_size)
    for slot in range(slots):
        known, prompt = token_ids[slot, : lengths[slot]].tolist(), int(prompts[slot])
        expected = penalised(logits[slot], known[:prompt], known[prompt:], requests[slot].params)
        torch.testing.assert_close(changed[slot].cpu().double(), expected, rtol=1e-6, atol=1e-6)
    assert penalties or torch.equal(changed.cpu(), logits)


class RecordedLogits:
    """The logits of each sampled token, by the request's name, of a runner without graphs."""

    def __init__(self, runner: Any) -> None:
        self.of: dict[str, list[torch.Tensor]] = {}
        self._newest = torch.empty(0)
        self._launched: deque[torch.Tensor] = deque()
        self._project, self._launch = runner.model.logits, runner.launch
        runner.model.logits, runner.launch = self._logits, self._step

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """A step's last call counts: before it there may be one without rows, which compiles the kernels."""
        logits: torch.Tensor = self._project(hidden)
        self._newest = logits.clone()
        return logits

    def _step(self, step: Step) -> Any:
        launched = self._launch(step)
        self._launched.append(self._newest)
        return launched

    def __call__(self, step: Step, sampled: list[str]) -> None:
        for name, logits in zip(sampled, self._launched.popleft(), strict=False):
            self.of.setdefault(name, []).append(logits.cpu())


def test_every_schedule_sees_the_same_tokens(tiny_models: TinyModels) -> None:
    runner = make_cuda_runner(tiny_models.folder("llama"), num_slots=12, num_blocks=100, max_model_len=96, graphs=False)
    base = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    jobs = [Job(PROMPT, dataclasses.replace(base, **penalties)) for penalties in [*PENALTIES, {}]]
    recorded = RecordedLogits(runner)

    def run(jobs: list[Job], **options: Any) -> list[Answer]:
        recorded.of.clear()
        answers = Stack(runner, max_num_seqs=8, on_step=recorded, **options).run(jobs)
        for name, (job, answer) in enumerate(zip(jobs, answers, strict=True)):
            seen = recorded.of[str(name)]
            for place, token in enumerate(answer.ids):
                expected = penalised(seen[place], job.prompt, answer.ids[:place], job.params)
                assert expected.max() - expected[token] < 1e-5, f"token {place} of {job.params}"
        return answers

    expected = ids_of(run(jobs, budget=256))
    assert not ON_GPU or len({tuple(ids) for ids in expected}) > len(PENALTIES) // 2
    assert ids_of(run(jobs, budget=16)) == expected
    resting = [dataclasses.replace(job, rest_at=OUTPUT // 2) for job in jobs]
    preempted = run(resting, budget=64)
    assert all(answer.preemptions for answer in preempted)
    assert ids_of(preempted) == expected
    late = [dataclasses.replace(job, arrives=0 if index == 0 else 4) for index, job in enumerate(jobs)]
    cached = Stack(runner, max_num_seqs=8, caching=True, on_step=recorded)
    recorded.of.clear()
    assert ids_of(cached.run(late)) == expected
    assert cached.metric("vllm:prefix_cache_hits_total") > 0
