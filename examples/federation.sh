#!/usr/bin/env bash
# Train on Flower on this machine: a SuperLink, a SuperNode for each client, and a run, which all end with this script.
#
#     examples/federation.sh NODES CONFIG OUTPUT [KEY=VALUE …]
#     examples/federation.sh 4 configs/quickstart.yaml runs/federation rounds=5
#
# The same command resumes a run. Logs are in OUTPUT/federation. The ports are PORT (by default 8000) and the next ones.
set -euo pipefail
(($# >= 3)) || { sed -n 's/^# \{0,1\}//p' "$0"; exit 2; }

nodes=$1 config=$(cd "$(dirname "$2")" && pwd)/$(basename "$2") port=${PORT:-8000}
mkdir -p "$3" && mkdir -p -m 700 "$3/federation" && mkdir -p "$3/federation/home"  # others may not read the logs
output=$(cd "$3" && pwd) app=$(cd "$(dirname "$0")/.." && pwd)
shift 3
logs=$output/federation address=127.0.0.1:$port

export FLWR_HOME=$logs/home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export no_proxy=127.0.0.1 NO_PROXY=127.0.0.1 no_grpc_proxy=127.0.0.1  # loopback is no matter for a proxy
export PYTHONPATH=$app:$PWD${PYTHONPATH:+:$PYTHONPATH}                # `plugins` may be in the working folder
trap 'kill $(jobs -p) 2> /dev/null; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

flower-superlink --insecure --host 127.0.0.1 --port "$port" --disable-runtime-dependency-installation \
    &> "$logs/superlink.log" &
until (: < "/dev/tcp/127.0.0.1/$port") 2> /dev/null; do
    kill -0 $! 2> /dev/null || { tail -n 3 "$logs/superlink.log" >&2; exit 1; }
    sleep 0.2
done
for ((node = 0; node < nodes; node++)); do
    FLWR_HOME=$logs/node-$node python -m sharding.flower.warm --insecure --superlink "$address" \
        --port $((port + 1 + node)) --node-config "partition-id=$node" &> "$logs/node-$node.log" &
done

printf '[superlink.here]\naddress = "%s"\ninsecure = true\n' "$address" > "$FLWR_HOME/config.toml"
printf -v overrides '%q ' "clients.count=$nodes" "clients.per_round=$nodes" "output=$output" "$@"
printf "config = '%s'\noverrides = '''%s'''\n" "$config" "$overrides" > "$logs/run.toml"
flwr run "$app" here --stream --run-config "$logs/run.toml" 2>&1 | tee "$logs/run.log" &
wait $! || true  # a signal interrupts it, and would wait for a command in the foreground
grep -q "finished: " "$logs/run.log" || { echo "the run has not finished; the same command resumes it" >&2; exit 1; }
