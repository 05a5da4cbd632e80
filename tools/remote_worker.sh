#!/usr/bin/env bash
# Runs a command while a Remote Execution API server listens on a free port of 127.0.0.1; REMOTE_EXECUTOR is its address. It
# starts with an empty cache, and is gone afterwards.
#
#   tools/remote_worker.sh bash -c 'bazel test --config=remote --remote_executor="${REMOTE_EXECUTOR}" //tests/config/...'
#
# It is the worker of Bazel's own tests, from Debian's source package of the Bazel that is in use. The patch has it listen on
# 127.0.0.1 alone, on a port that the system chooses, and end actions that run out of time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh bazel-bootstrap-source patch

readonly server_jar=/usr/share/bazel/A-server.jar
readonly source=/usr/src/bazel-bootstrap/src/tools/remote/src/main/java/com/google/devtools/build/remote/worker
folder="$(mktemp -d --tmpdir remote_worker.XXXXXX)"
readonly folder
worker=
cleanup() {
  [[ -z "${worker}" ]] || { kill "${worker}" && wait "${worker}"; } 2>/dev/null || true
  chmod -R u+w "${folder}" && rm -rf "${folder}"
}
trap cleanup EXIT

cp -r "${source}" "${folder}/source"
patch --quiet --strip=1 --directory="${folder}/source" <tools/remote_worker.patch
find "${folder}/source" -name '*.java' -exec javac -nowarn -Xlint:none -d "${folder}/classes" -cp "${server_jar}" {} + \
  2>"${folder}/javac.log" || { cat "${folder}/javac.log" >&2; exit 1; }

mkdir "${folder}/cas" "${folder}/work"
touch "${folder}/log"
java -cp "${folder}/classes:${server_jar}" com.google.devtools.build.remote.worker.RemoteWorker \
  --listen_port=0 --cas_path="${folder}/cas" --work_path="${folder}/work" >"${folder}/log" 2>&1 &
worker=$!
until port="$(sed -n 's/.*Started gRPC server on port \([0-9]*\)$/\1/p' "${folder}/log")" && [[ -n "${port}" ]]; do
  kill -0 "${worker}" 2>/dev/null || { cat "${folder}/log" >&2; exit 1; }
  sleep 0.1
done
REMOTE_EXECUTOR="grpc://127.0.0.1:${port}" "$@"
