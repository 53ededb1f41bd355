#!/bin/bash
# Trains on hosts that are joined by nothing but their addresses:
#
#     examples/launch/nodes.sh 10.0.0.1 10.0.0.2 -- python examples/launch/train.py [arguments]
#
# It needs ssh without a password, and this directory under the same path on each host. The first host
# coordinates, on port ${PORT:-9876}. By hand it is one line on each host, with its own JAX_PROCESS_ID:
#
#     JAX_COORDINATOR_ADDRESS=10.0.0.1:9876 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 python examples/launch/train.py
set -u
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do hosts+=("$1"); shift; done
if [ ${#hosts[@]} -eq 0 ] || [ $# -lt 2 ]; then echo "usage: $0 HOST... -- COMMAND..." >&2; exit 2; fi
shift

workers=()
for i in "${!hosts[@]}"; do
  variables="JAX_COORDINATOR_ADDRESS=${hosts[0]}:${PORT:-9876} JAX_NUM_PROCESSES=${#hosts[@]} JAX_PROCESS_ID=$i"
  for name in $(compgen -e | grep -E '^(JAX_(PLATFORMS|ENABLE_X64|NUM_CPU_DEVICES)|XLA_FLAGS)$'); do
    variables+=" $name=$(printf %q "${!name}")"
  done
  ${SSH:-ssh} "${hosts[$i]}" "cd $(printf %q "$PWD") && $variables exec $(printf '%q ' "$@")" < /dev/null &
  workers+=($!)
done

status=0
for worker in "${workers[@]}"; do
  wait "$worker" || status=$?  # when one fails, the others end by themselves
done
exit $status
