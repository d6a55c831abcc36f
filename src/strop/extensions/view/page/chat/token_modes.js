// By what tokens are coloured. A mode gives each token a level from -5 to 5; 0 and null have no colour.

export const LEVELS = 5;

/** A level by size: `scale` is where the strongest colour begins. */
function levelOf(value, scale) {
  if (value === null || value === undefined || !Number.isFinite(value) || value === 0) return 0;
  const size = Math.min(Math.ceil((Math.abs(value) / scale) * LEVELS), LEVELS);
  return value < 0 ? -size : size;
}

/**
 * {name, title, explain, column, value(tokens, index): the number that is coloured, scale(tokens), ends: [low, high], and where numbers are
 * logarithms shown(number)}. A mode whose column
 * is null for a rollout is not offered.
 */
export const MODES = [
  {
    name: "advantage", title: "advantage", column: "advantages", ends: ["pushed down", "pushed up"],
    explain: "credit of the token: above zero it is made more probable, below zero less",
    value: (tokens, index) => tokens.advantages[index], scale: largest("advantages", 2),
  },
  {
    name: "probability", title: "probability", column: "sampler_logprobs", ends: ["improbable (1 in 150)", ""],
    explain: "how improbable the token was to the sampler; certain tokens have no colour",
    value: (tokens, index) => tokens.sampler_logprobs[index], scale: () => 5,
  },
  {
    name: "ratio", title: "ratio learner / sampler", column: "ratio", ends: ["less probable to the learner", "more probable"],
    explain: "the learner's probability over the sampler's; 1 is perfect and has no colour",
    value: (tokens, index) => logOf(tokens.ratio[index]), scale: largestLog("ratio"), shown: Math.exp,
  },
  {
    name: "entropy", title: "entropy", column: "entropy", ends: ["", "undecided"],
    explain: "nats of the distribution that the token was sampled from",
    value: (tokens, index) => tokens.entropy[index], scale: largest("entropy", 0.1),
  },
  {
    name: "kl", title: "KL to the reference", column: "reference_kl", ends: ["less probable than to the reference", "more probable"],
    explain: "how far the token's probability is from the reference model's",
    value: (tokens, index) => tokens.reference_kl[index], scale: largest("reference_kl", 0.01),
  },
  {
    name: "correction", title: "correction", column: "correction", ends: ["weighted less", "weighted more"],
    explain: "weight of the importance correction; 1 has no colour",
    value: (tokens, index) => logOf(tokens.correction[index]), scale: largestLog("correction"), shown: Math.exp,
  },
  {
    name: "clipped", title: "clipped or masked", column: null, ends: ["", ""],
    explain: "dashed frame: clipped, no gradient from the objective; struck through: masked, not trained on", value: () => 0, scale: () => 1,
  },
];

/** The modes that this rollout has numbers for, and one for each term of its ledger. */
export function availableModes(rollout, ledger = null) {
  const known = MODES.filter((mode) => (mode.column === null ? rollout.clipped || rollout.mask : hasNumbers(rollout[mode.column])));
  return [...known, ...ledgerModes(ledger)];
}

function ledgerModes(ledger) {
  return Object.entries(ledger?.terms ?? {}).map(([name, values]) => ({
    name: `ledger:${name}`, title: `ledger: ${name}`, ends: ["lowers the loss", "raises the loss"],
    explain: `what the term "${name}" of the loss contributes at the token`,
    value: (tokens, index) => values[index], scale: () => Math.max(...values.filter(Number.isFinite).map(Math.abs), 1e-12),
  }));
}

/** The level of every token, and the scale. */
export function levelsOf(mode, tokens, count) {
  const scale = mode.scale(tokens);
  return { scale, levels: Array.from({ length: count }, (_, index) => (isSampled(tokens, index) ? levelOf(mode.value(tokens, index), scale) : 0)) };
}

export function isSampled(tokens, index) {
  return tokens.sampled ? Boolean(tokens.sampled[index]) : true;
}

/** Whether a token that the policy sampled has no gradient: it does not count in the loss, or something took it out. */
export function isMasked(tokens, index) {
  if (!isSampled(tokens, index)) return false;
  const mask = tokens.mask?.[index];
  return (mask !== null && mask !== undefined && !mask) || Boolean(tokens.mask_reason?.[index]);
}

const REASONS = {
  environment: "written by the environment",
  left_out: "its rollout is left out of the loss",
  overlong: "its rollout was cut at a limit of tokens",
  sequence_error: "sampler and learner differ too much over its rollout",
  rejected: "the correction rejects it",
  not_selected: "the algorithm selects other tokens",
  not_predicted: "it is not predicted: one value stands for the rollout",
};

/** Why a token is masked, in words. */
export function describeReason(reason) {
  return REASONS[reason] ?? (reason || "no reason was stored");
}

function hasNumbers(column) {
  return Boolean(column?.some((value) => value !== null && value !== undefined));
}

function largest(column, least) {
  return (tokens) => tokens[column].reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), least);
}

/** Where the strongest colour of a ratio begins: between a twentieth and twice. */
function largestLog(column) {
  return (tokens) => Math.min(tokens[column].reduce((most, value) => Math.max(most, Math.abs(logOf(value) ?? 0)), Math.log(1.05)), Math.log(2));
}

function logOf(value) {
  return value > 0 ? Math.log(value) : null;
}
