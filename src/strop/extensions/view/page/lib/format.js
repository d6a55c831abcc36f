// Numbers, durations and times as text. What is unknown (null, not finite) is an en dash.
export const UNKNOWN = "–";

export function formatNumber(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  if (Number.isInteger(value) && Math.abs(value) < 1e7) return formatCount(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(digits - 2, 1)).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

/** Numbers of an axis that are `step` apart: with as many digits as tell them apart. */
export function formatTicks(values, step) {
  const most = values.reduce((size, value) => Math.max(size, Math.abs(value ?? 0)), 0);
  const digits = step > 0 && most > 0 ? Math.min(Math.max(Math.ceil(Math.log10(most / step)) + 2, 2), 9) : 4;
  return values.map((value) => (value === null ? null : formatNumber(Math.abs(value) < step / 1e6 ? 0 : value, digits)));
}

export function formatSigned(value, digits = 3) {
  const text = formatNumber(value, digits);
  return value > 0 ? "+" + text : text;
}

/** 1234567 -> "1,234,567" */
export function formatCount(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  return (Math.round(value) + 0).toLocaleString("en-US"); // -0 is 0
}

export function formatShare(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  if (value > 0 && value < 0.0005) return "< 0.1 %";
  return (value * 100).toFixed(value !== 0 && Math.abs(value) < 0.1 ? 1 : 0) + " %";
}

/** Seconds as "0.42 s", "3 min 20 s", "2 h 5 min". */
export function formatDuration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return UNKNOWN;
  if (seconds < 0) return "0 s";
  if (seconds < 0.1) return `${formatNumber(seconds * 1000, 2)} ms`;
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return whole % 60 ? `${minutes} min ${whole % 60} s` : `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** Unix time -> "2026-11-23 20:14:05", in the reader's time zone. */
export function formatTime(seconds) {
  if (!Number.isFinite(seconds) || seconds === null) return UNKNOWN;
  const date = new Date(seconds * 1000);
  const pad = (number) => String(number).padStart(2, "0");
  return (
    `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ` +
    `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`
  );
}

export function formatAgo(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  const passed = Date.now() / 1000 - seconds;
  return passed < 1 ? "just now" : `${formatDuration(passed)} ago`;
}

/** A time of the API: Unix seconds, or ISO text. */
export function toSeconds(time) {
  if (time === null || time === undefined) return null;
  if (typeof time === "number") return time;
  const milliseconds = Date.parse(time);
  return Number.isNaN(milliseconds) ? null : milliseconds / 1000;
}

/** Any value of JSON as one line of text. */
export function formatValue(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (typeof value === "number") return formatNumber(value, 6);
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** Control characters as codes, so that nothing hides: "\u001b" -> "\\x1b". Line breaks and tabs stay. */
export function printable(text) {
  return String(text).replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g, (character) => {
    const code = character.codePointAt(0);
    return code < 256 ? "\\x" + code.toString(16).padStart(2, "0") : "\\u" + code.toString(16).padStart(4, "0");
  });
}
