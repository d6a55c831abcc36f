// The paths of an agent's rollout: path 0 is the main one, the others leave it or each other.

/**
 * [{number, parent, own: tokens of the parent's own turns that it continues, isAnew, turns, tokens, children}]. A branch's stored start counts
 * from the beginning of the prompt.
 */
export function listPaths(rollout) {
  const turns = rollout.turns ?? [];
  const paths = [{ number: 0, parent: null, start: 0 }, ...(rollout.branches ?? []).map((branch, index) => ({ number: index + 1, ...branch }))];
  for (const path of paths) {
    path.turns = turns.filter((turn) => (turn.path ?? 0) === path.number);
    path.tokens = path.turns.length ? Math.max(...path.turns.map((turn) => turn.end)) - path.turns[0].start : 0;
    path.children = paths.filter((other) => other.parent === path.number);
    path.isAnew = path.number > 0 && path.start === 0;
    path.own = path.number ? Math.max(path.start - contextOf(rollout, path.parent), 0) : 0;
  }
  return paths;
}

/** Tokens before a path's own turns, the prompt among them. */
function contextOf(rollout, number) {
  return number ? rollout.branches[number - 1].start : (rollout.prompt_tokens ?? 0);
}

/** The turns that a path reads: its own, and those of its parents as far as it continues them. `shownEnd` is where it leaves a turn. */
export function listTurns(rollout, number, limit = Infinity) {
  const branch = number ? rollout.branches[number - 1] : null;
  if (number && !branch) return [];
  const own = (rollout.turns ?? []).filter((turn) => (turn.path ?? 0) === number);
  const shift = contextOf(rollout, number) - (own[0]?.start ?? 0);
  const inherited = branch && branch.parent < number ? listTurns(rollout, branch.parent, Math.min(branch.start, limit)) : [];
  return [...inherited, ...own.filter((turn) => turn.start + shift < limit).map((turn) => ({ ...turn, shownEnd: Math.min(turn.end, limit - shift) }))];
}

/** Whether a path begins with the prompt: a branch that shares no token has a prompt of its own. */
export function continuesPrompt(rollout, number) {
  if (!number) return true;
  const branch = rollout.branches?.[number - 1];
  return Boolean(branch) && branch.start > 0 && (branch.parent >= number || continuesPrompt(rollout, branch.parent));
}
