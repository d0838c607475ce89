"""Whole requests through real parents and children, in a world that loses, repeats and delays messages, stops processes
and crashes them. The schedules are random but seeded; every message goes through the codec.

A client checks what it is told: each request ends exactly once, with exactly the rows of the undisturbed run (det), or
with rows that follow from each other (nondet: a recomputed continuation may differ). At the end nothing is left behind.
"""

from __future__ import annotations

import codecs
import functools
import random
import zlib
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from shared.codec import decode, encode
from shared.errors import ErrorCode
from shared.hop import ENGINE, Child, Parent, Relay, Timers, digest
from shared.messages import End, ErrorInfo, FinishReason, Known, TextSpec, TokenSpec
from shared.sampling import SamplingParams

TIMERS = Timers(beat_s=8, lease_s=160)
PATIENCE, SLOTS, QUEUE, SALTS = 100, 4, 40, 3
VOCAB = [b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"\xc3\xa9", b"\xe2\x82", b"\xac", b"c", b" "]
NO_POISON, POISON_TOKENIZER, POISON_ENGINE = 0, 1, 2


def hashed(*parts):
    return zlib.crc32(repr(parts).encode())


@functools.lru_cache(200_000)
def next_row(seed, choice, ids, salt, max_tokens):
    """What the engine makes after ``ids``: a token, or an END reason."""
    if len(ids) >= max_tokens:
        return FinishReason.LENGTH
    token = hashed(seed, choice, ids, salt) % 1000
    return FinishReason.STOP if token % 40 == 0 else token


def released(ids, stops, final):
    """The text that may be shown after these ids, and whether a stop string was found."""
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(VOCAB[i % 11] for i in ids), final)
    cut = min((text.find(stop) for stop in stops if stop in text), default=-1)
    if cut >= 0:
        return text[:cut], True
    held = 0 if final else max((k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])), default=0)
    return text[: len(text) - held], False


@functools.lru_cache(20_000)
def rendered(ids, reason, stops):
    """(pieces, last piece, reason) of engine rows: a pure function, so that any tokenizer can take over at any row."""
    pieces, shown = [], ""
    for count in range(1, len(ids) + 1):
        text, hit = released(ids[:count], stops, False)
        pieces.append(text[len(shown) :])
        shown = text
        if hit:
            return pieces, "", FinishReason.STOP
    if reason is None:
        return pieces, "", None
    return pieces, released(ids, stops, True)[0][len(shown) :], reason


class Violation(Exception):
    pass


class Crash(Exception):
    pass


class Process:
    """Base: a name, a life and an own clock."""

    below = None
    """The lower side, of those that have one."""
    children = "E"

    def __init__(self, world, name):
        self.world, self.name, self.boot, self.now = world, name, world.new_boot(), 0

    @property
    def identity(self):
        return f"{self.name}/{self.boot}"

    def clock(self):
        return self.now

    def send_down(self, name, message):
        return self.world.send(self, name, self.identity, message)

    def send_up(self, identity, message):
        return self.world.send(self, identity, self.name, message)

    def find_children(self, rng=None):
        """Ask DNS, which for a while may not know all of them."""
        parent, names = self.below, self.world.names[self.children]
        if parent is not None:
            parent.set_children(names if rng is None else rng.sample(names, rng.randint(0, len(names))))
            self.world.count["dns changes"] += rng is not None


@dataclass(eq=False)
class Stream:
    """A client's connection to a gateway."""

    gateway: Process
    client: object
    shown: list[int]
    open: bool = True
    terminated: bool = False


class Gateway(Process):
    children = "T"

    def __init__(self, world, name):
        super().__init__(world, name)
        self.below = self.parent = Parent(
            send=self.send_down,
            clock=self.clock,
            timers=TIMERS,
            events=self,
            children=world.names["T"],
            uid=world.new_boot,
        )
        self.keep_alive_at = 0

    def receive(self, src, boot, message):
        self.parent.receive(src, boot, message)

    def open(self, stream):
        client = stream.client
        request = self.parent.find(client.rid, client.known())
        if request is None:
            ended = [choice for choice, end in enumerate(client.ends) if end is not None]
            request = self.parent.open(client.rid, client.spec, client.known(), ended, stream)
        request.context = stream
        self.grew([(log, 0) for log in request.logs])

    def accepted(self, request):
        request.context.client.prompt_tokens = request.prompt_tokens

    def grew(self, growths):
        for request in dict.fromkeys(log.request for log, _ in growths):
            stream, failed = request.context, next((log.end for log in request.logs if log.failed), None)
            for log, known in zip(request.logs, stream.client.known(), strict=True) if not failed else ():
                start = stream.shown[log.choice]
                if start < log.rows and known.count == start:
                    if not log.has(known):
                        failed = End(FinishReason.ERROR, error=ErrorInfo(ErrorCode.LOST, "diverged"))
                        break
                    stream.shown[log.choice] = log.rows
                    stream.client.rows(stream, log.choice, list(log.ids[start:]), log.pieces[start:], log.end, log)
            if failed or request.over:
                stream.client.terminal(stream, failed)
                if failed:
                    self.parent.close(request)

    def superseded(self, request, live):
        self.world.count["superseded"] += 1
        request.context.open = False
        self.world.gave_up.add(request.context)

    def tick(self):
        for request in list(self.parent.requests.values()):
            if not request.context.open:
                self.parent.close(request, keep=request.spec.resumable)
            elif self.now % 8 == 0:
                request.context.client.quiet = 0
        self.parent.tick()
        self.parent.flush()

    def left(self):
        links = [link.handles for link in self.parent.children if link.handles]
        return list(self.parent.requests) + links + list(self.parent._unplaced)


class Tokenizer(Process):
    def __init__(self, world, name):
        super().__init__(world, name)
        self.relay = Relay(
            send_up=self.send_up,
            send_down=self.send_down,
            clock=self.clock,
            timers=TIMERS,
            events=self,
            engines=world.names["E"],
        )
        self.below = self.relay.parent
        self.encoding = []

    def receive(self, src, boot, message):
        if src in self.world.names["E"]:
            self.relay.receive_from_engine(src, boot, message)
        else:
            self.relay.receive_from_gateway(src, boot, message)

    def begin(self, request):
        if np.frombuffer(request.spec.ids, np.int32)[0] == POISON_TOKENIZER:
            raise Crash
        self.encoding.append(request)

    def replaced(self, log):
        self.render(log)

    def grew(self, growths):
        for log, _ in growths:
            self.render(log)

    def render(self, log):
        reason = log.end.reason if log.end else None
        log.pieces, piece, end = rendered(tuple(log.ids), reason, tuple(log.request.spec.params.stop))
        log.pieces = list(log.pieces)
        if end is not None:
            given = log.end if log.end is not None and len(log.pieces) == len(log.ids) else End(end)
            log.cut(len(log.pieces), given, piece)

    def dropped(self, request):
        pass

    def tick(self):
        if self.world.rng.random() < 0.5:  # encoding takes a while
            for request in self.encoding:
                self.relay.start(request, TokenSpec(request.spec.params, request.spec.ids))
            self.encoding.clear()
        self.relay.tick()
        self.relay.flush()

    def left(self):
        child, parent = self.relay.child, self.relay.parent
        links = [link.handles for link in parent.children if link.handles]
        return list(child.requests) + list(parent.requests) + links + list(child._outboxes) + list(parent._unplaced)


class Engine(Process):
    def __init__(self, world, name):
        super().__init__(world, name)
        self.child = Child(
            send=self.send_up, clock=self.clock, timers=TIMERS, events=self, role=ENGINE, recompute=world.det
        )
        self.running = {}
        self.in_flight = deque()
        self.resting = set()

    def receive(self, src, boot, message):
        self.child.receive(src, boot, message)

    def begin(self, request):
        _, _, refuse = np.frombuffer(request.spec.prompt, np.int32)
        if refuse:
            self.child.fail(request, ErrorInfo(ErrorCode.TOO_LARGE, "never fits"))
            return
        self.child.accept(request, 3)
        self.running |= {log: None for log in request.logs if log.end is None}

    def replaced(self, old, new):
        if old in self.running:
            del self.running[old]
        if new.end is None and new.request.upper.started:
            self.running[new] = None

    def resubmitted(self, request):
        self.child.accept(request, 3)

    def unwanted(self, log):
        self.running.pop(log, None)

    def rested(self, request, resting):
        (self.resting.add if resting else self.resting.discard)(request)

    def dropped(self, request):
        self.resting.discard(request)
        for log in request.logs:
            self.running.pop(log, None)

    def tick(self):
        world, salt = self.world, 0 if self.world.det else self.boot % SALTS
        if len(self.in_flight) > 1 or (self.in_flight and world.rng.random() < 0.5):
            self.settle(self.in_flight.popleft())
        step = []
        for log in list(self.running)[:SLOTS]:
            if log.request in self.resting or any(log is other for planned in self.in_flight for other, _ in planned):
                continue
            params = log.request.spec.params
            kind, at, _ = np.frombuffer(log.request.spec.prompt, np.int32)
            if kind == POISON_ENGINE and len(log.ids) == at:
                raise Crash
            step.append((log, next_row(params.seed, log.choice, tuple(log.ids), salt, params.max_tokens)))
        if step:
            self.in_flight.append(step)
        self.child.tick()
        self.child.flush()

    def settle(self, step):
        wanted = [(log, row) for log, row in step if log.end is None]
        tokens = [(log, row) for log, row in wanted if not isinstance(row, FinishReason)]
        for log, row in tokens:
            self.child.append(log, row)
        for log, row in wanted:
            if isinstance(row, FinishReason):
                self.running.pop(log, None)
                self.child.finish(log, End(row))

    def left(self):
        return list(self.child.requests) + list(self.child._outboxes) + list(self.running) + list(self.resting)


@dataclass(eq=False)
class Client:
    """One request: opens it, checks every row, resumes it."""

    world: object
    rid: str
    spec: TextSpec
    at: int
    abort_at: float
    ids: list = field(init=False)
    text: list = field(init=False)
    ends: list = field(init=False)
    stream: Stream | None = None
    end: str | None = None
    opens: int = 0
    quiet: int = 0
    prompt_tokens: int = 0

    def __post_init__(self):
        n = self.spec.params.n
        self.ids, self.text, self.ends = [[] for _ in range(n)], [""] * n, [None] * n

    def known(self):
        return [Known(len(ids), digest(ids)) for ids in self.ids]

    def rows(self, stream, choice, ids, pieces, end, log):
        self.world.check(not stream.terminated, f"{self.rid}: rows after the terminal")
        if stream is not self.stream or not stream.open:
            return
        self.quiet = 0
        self.world.check(self.ends[choice] is None, f"{self.rid}: rows after the end")
        self.ids[choice] += ids
        self.text[choice] += "".join(pieces)
        if end is not None:
            self.ends[choice] = end
            self.text[choice] += log.last_piece

    def terminal(self, stream, failed):
        self.world.check(not stream.terminated, f"{self.rid}: a second terminal")
        stream.terminated = True
        if stream is not self.stream or not stream.open:
            return
        self.end = ErrorCode(failed.error.code).name.lower() if failed else "done"
        stream.open = False

    def tick(self, now):
        if self.end or now < self.at:
            return
        world, stream = self.world, self.stream
        if stream is not None and now >= self.abort_at:
            self.end, stream.open = "aborted", False
            return
        self.quiet += 1
        if stream is not None and self.quiet > PATIENCE:
            stream.open = False
        if stream is not None and not stream.open:
            fair = self.spec.resumable or stream not in world.gave_up
            world.check(fair, f"{self.rid}: the gateway cut it without a cause")
            self.stream, self.at = None, now + world.rng.randint(1, 20)
            self.end = None if self.spec.resumable else "cut"
        elif stream is None:
            gateway = world.processes.get(world.rng.choice(world.names["G"]))
            if gateway is not None and gateway.name not in world.stopped:
                shown = [len(ids) + (end is not None) for ids, end in zip(self.ids, self.ends, strict=True)]
                self.stream, self.quiet = Stream(gateway, self, shown), 0
                self.opens += 1
                gateway.open(self.stream)


KINDS = {"G": Gateway, "T": Tokenizer, "E": Engine}


class World:
    def __init__(self, seed, det):
        rng = self.rng = random.Random(seed)
        self.det, self.t, self.boots, self.count = det, 0, 0, Counter()
        self.names = {"G": ["G0", "G1"], "T": ["T0", "T1"], "E": rng.choice([["E0"], ["E0", "E1"]])}
        self.queues, self.processes, self.stopped, self.restart_at = {}, {}, {}, {}
        self.gave_up = set()
        self.hints = []
        """(time, process, child, whether it is connected): what processes will be told of connections."""
        self.loss = rng.choice([0, 0.02, 0.08])
        self.fault = rng.choice([0, 0.005, 0.02, 0.05])
        self.until = rng.choice([150, 300, 500])
        self.faults = rng.choice(
            [
                ["crash", "stop", "cut"],
                ["crash", "stop", "stop"],
                ["crash", "disconnect"],
                ["stop", "cut"],
                ["dns", "crash", "stop"],
                ["disconnect", "disconnect", "stop"],
            ]
        )
        for name in [*self.names["G"], *self.names["T"], *self.names["E"]]:
            self.processes[name] = KINDS[name[0]](self, name)
        self.clients = [self.new_client(i, seed) for i in range(rng.randint(3, 8))]

    def new_client(self, index, seed):
        rng = self.rng
        stops = rng.sample(["abc", "ba", "é", "cc", "b a", "aab"], rng.choice([0, 1, 2]))
        poison = rng.choice([POISON_TOKENIZER, POISON_ENGINE]) if rng.random() < 0.1 and self.fault else NO_POISON
        prompt = np.array([poison, rng.randint(0, 6), rng.random() < 0.05], np.int32).tobytes()
        params = SamplingParams(
            n=rng.choice([1, 1, 2]),
            seed=seed * 100 + index,
            max_tokens=rng.choice([rng.randint(1, 25), 40]),
            stop=stops,
        )
        spec = TextSpec(params, ids=prompt, resumable=rng.random() < 0.7)
        abort_at = rng.choice([float("inf")] * 5 + [rng.randint(20, 400)])
        return Client(self, f"r{index}", spec, rng.randint(0, 100), abort_at)

    def new_boot(self):
        self.boots += 1
        return self.boots

    def check(self, good, why):
        if not good:
            raise Violation(why)

    def send(self, source, to, sender_name, message):
        """``to`` is a name (down: whoever has it now) or an identity (up: that life alone)."""
        self.count["messages"] += 1
        name = to.partition("/")[0]
        process = self.processes.get(name)
        if process is None or ("/" in to and process.identity != to):
            return self.rng.random() < 0.2  # mostly seen, sometimes lost
        queue = self.queues.setdefault((source.name, name), deque())
        if len(queue) >= QUEUE or self.rng.random() < self.loss / 4:
            self.count["refused"] += 1
            return False
        copies = self.rng.choice([0, 0, 2]) if self.rng.random() < self.loss else 1
        self.count["lost" if not copies else "repeated"] += copies != 1
        queue.extend([(sender_name, encode(message, source.boot))] * copies)
        return True

    def crash(self, name):
        self.count["crashes"] += 1
        process = self.processes.pop(name)
        self.stopped.pop(name, None)
        for link in [link for link in self.queues if name in link]:
            del self.queues[link]
        for client in self.clients:
            if client.stream is not None and client.stream.gateway is process:
                client.stream.open = False
        self.restart_at[name] = self.t + self.rng.randint(1, 60)
        for parent in self.parents_of(name):
            self.hint(parent, name, self.restart_at[name] + self.rng.randint(0, 5))

    def parents_of(self, name):
        return [process for process in self.processes.values() if process.below and process.children == name[0]]

    def hint(self, parent, child, back_at):
        """Tell of a lost connection, soon, late or never, and when it is there again."""
        if self.rng.random() < 0.9:
            self.hints.append((self.t + self.rng.choice([0, 1, 3, 30]), parent, child, False))
        self.hints.append((back_at, parent, child, True))

    def disconnect(self, child):
        """Cut the connection between a child and one of its parents, or only say so."""
        parents = self.parents_of(child)
        if parents:
            parent = self.rng.choice(parents)
            if self.rng.random() < 0.7:
                self.queues.pop((parent.name, child), None)
                self.queues.pop((child, parent.name), None)
            self.hint(parent, child, self.t + self.rng.choice([1, 5, 60]))
            self.count["disconnects"] += 1

    def give_hints(self):
        for hint in [hint for hint in self.hints if hint[0] <= self.t and hint[1].name not in self.stopped]:
            self.hints.remove(hint)
            _, parent, child, connected = hint
            if connected:
                parent.below.reached(child)
                parent.below.set_usable(child, True)
            else:
                parent.below.lost(child)
                self.count["hints"] += 1

    def inject(self):
        rng, names = self.rng, list(self.processes)
        for name in rng.sample(names, min(len(names), rng.choice([1, 1, 1, 2, 3, len(names)]))):
            what = rng.choice(self.faults)
            if what == "crash":
                self.crash(name)
            elif what == "dns":
                self.processes[name].find_children(rng)
            elif what == "stop":
                self.stopped[name] = self.t + rng.choice([5, 40, 60, 100, 300])
                self.count["stops"] += 1
            elif what == "disconnect":
                self.disconnect(name)
            else:
                streams = [client.stream for client in self.clients if client.stream is not None]
                if streams:
                    rng.choice(streams).open = False

    def step(self):
        rng = self.rng
        self.t += 1
        if self.t < self.until and rng.random() < self.fault:
            self.inject()
        for name, at in list(self.restart_at.items()):
            if at <= self.t:
                del self.restart_at[name]
                self.processes[name] = KINDS[name[0]](self, name)
        if self.t == self.until:
            for process in self.processes.values():
                process.find_children()
        limit = self.until + 300
        self.stopped = {name: at for name, at in self.stopped.items() if self.t < min(at, limit)}
        self.give_hints()
        for client in self.clients:
            client.tick(self.t)
        order = list(self.processes.values())
        rng.shuffle(order)
        for process in order:
            if process.name in self.stopped or rng.random() < 0.1:
                continue
            process.now += 1
            try:
                self.deliver(process)
                process.tick()
            except Crash:
                self.count["poison crashes"] += 1
                self.crash(process.name)

    def deliver(self, process):
        for _ in range(self.rng.randint(0, 12)):
            ready = [link for link, queue in self.queues.items() if link[1] == process.name and queue]
            if not ready:
                return
            sender, frames = self.queues[self.rng.choice(ready)].popleft()
            process.receive(sender, *decode(frames))

    def run(self):
        quiet, settled = 0, 3 * TIMERS.lease_s + 100
        while quiet < settled:
            self.step()
            pending = [client.rid for client in self.clients if not client.end]
            self.check(self.t < 6000, f"no progress: {pending}")
            quiet = quiet + 1 if self.t > self.until and not pending else 0
            if quiet and quiet % 50 == 0 and not self.stopped and not any(p.left() for p in self.processes.values()):
                break
        for process in self.processes.values():
            self.check(not process.left(), f"{process.name} still holds {process.left()}")
        for client in self.clients:
            self.judge(client)
        return self.count

    def judge(self, client):
        self.count["end " + client.end] += 1
        params = client.spec.params
        stops = tuple(params.stop)
        for choice, (ids, text, end) in enumerate(zip(client.ids, client.text, client.ends, strict=True)):
            where = f"{client.rid}.{choice}"
            for i, token in enumerate(ids):
                valid = (next_row(params.seed, choice, tuple(ids[:i]), s, params.max_tokens) for s in range(SALTS))
                good = next_row(params.seed, choice, tuple(ids[:i]), 0, params.max_tokens) == token
                self.check(good or (not self.det and token in valid), f"{where}: token {i} follows from nothing")
            pieces, _, hit = rendered(tuple(ids), None, stops)
            self.check(len(pieces) == len(ids), f"{where}: tokens after a stop string")
            final, _ = released(tuple(ids), stops, True)
            self.check(text == final if end else final.startswith(text), f"{where}: text {text!r} of {final!r}")
            if end is not None and self.det:
                row = next_row(params.seed, choice, tuple(ids), 0, params.max_tokens)
                self.check(hit or end.reason == row, f"{where}: ended with {end.reason}")
            if client.end == "done":
                self.check(end is not None, f"{where}: done without END")
        poison, _, refuse = np.frombuffer(client.spec.ids, np.int32)
        self.check(client.end != "poison" or poison, f"{client.rid}: an innocent was failed")
        self.check(client.end != "too_large" or refuse, f"{client.rid}: refused")
        self.check(not (refuse and client.end == "done"), f"{client.rid}: not refused")
        self.check(client.end != "lost" or (not self.det and client.opens > 1), f"{client.rid}: lost")
