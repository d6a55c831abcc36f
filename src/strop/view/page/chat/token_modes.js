// By what tokens are coloured. A mode gives each token a level from -5 to 5; 0 and null have no colour.

export const LEVELS = 5;

/** A level by size: `scale` is where the strongest colour begins. */
function levelOf(value, scale) {
  if (value === null || value === undefined || !Number.isFinite(value) || value === 0) return 0;
  const size = Math.min(Math.ceil((Math.abs(value) / scale) * LEVELS), LEVELS);
  return value < 0 ? -size : size;
}

/**
 * {name, title, explain, column, value(tokens, index): the number that is coloured, scale(tokens), ends: [low, high]}. A mode whose column
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
    name: "ratio", title: "ratio learner / sampler", column: "ratio", ends: ["learner: half as probable", "learner: twice as probable"],
    explain: "the learner's probability over the sampler's; 1 is perfect and has no colour",
    value: (tokens, index) => logOf(tokens.ratio[index]), scale: () => Math.log(2),
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
    value: (tokens, index) => logOf(tokens.correction[index]), scale: () => Math.log(2),
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

export function isMasked(tokens, index) {
  return isSampled(tokens, index) && tokens.mask !== null && tokens.mask !== undefined && tokens.mask[index] === 0;
}

function hasNumbers(column) {
  return Boolean(column?.some((value) => value !== null && value !== undefined));
}

function largest(column, least) {
  return (tokens) => tokens[column].reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), least);
}

function logOf(value) {
  return value > 0 ? Math.log(value) : null;
}
