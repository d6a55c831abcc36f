#!/bin/bash
# stop-run.sh SECONDS: tell the run on this machine to end, and wait for so long while it saves.
# A run is a Python process with the command `strop` or a script examples/run_*.py. Reads /proc alone: an image may have no pgrep.

limit=${1:-540}

runs() {
    local folder words parent found=" "
    for folder in $(printf '%s\n' /proc/[0-9]* | sort -V); do
        mapfile -d '' -t words 2>/dev/null <"$folder/cmdline" || continue
        [[ ${words[0]:-} == *python* && ${words[1]:-} =~ (^|/)(strop|run_[a-z_]+\.py)$ ]] || continue
        parent=$(sed -n 's/^PPid:\t//p' "$folder/status" 2>/dev/null)
        [[ $found == *" $parent "* ]] || echo "${folder#/proc/}" # a process that the run forked has its command line, and is its own matter
        found+="${folder#/proc/} "
    done
}

mapfile -t found < <(runs)
((${#found[@]})) || exit 0
kill -TERM "${found[@]}" 2>/dev/null
while ((SECONDS < limit)); do
    alive=0
    for run in "${found[@]}"; do # a process that has ended but not been waited for has no command line
        read -r -d '' _ 2>/dev/null <"/proc/$run/cmdline" && alive=1
    done
    ((alive)) || exit 0
    sleep 0.5
done
echo "the run did not end within $limit s; raise terminationGracePeriodSeconds and the number in preStop" >&2
exit 1
