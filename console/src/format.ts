// Numbers with units and times in the reader's zone and language.

const integer = new Intl.NumberFormat();
const compact = new Intl.NumberFormat(undefined, { notation: "compact", maximumFractionDigits: 1 });
const threeDigits = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat(undefined, { style: "percent", maximumFractionDigits: 1 });
const dateTime = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
/** The server adds up days of UTC: west of it their beginning is still the day before. */
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", timeZone: "UTC" });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
const clockWithSeconds = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto" });

export const count = (value: number) => integer.format(value);
export const short = (value: number) => compact.format(value);
/** Three digits that matter: 0.0132, 1,320. */
export const significant = (value: number) => threeDigits.format(value);
export const share = (value: number) => percent.format(value);

/** 1.2 MB: decimal units, as disks and networks are sold. */
export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const step = Math.min(units.length - 1, Math.floor(Math.log10(Math.max(1, value)) / 3));
  const scaled = value / 1000 ** step;
  return `${scaled >= 100 || step === 0 ? Math.round(scaled) : scaled.toFixed(1)} ${units[step]}`;
}

export function duration(seconds: number | null | undefined): string {
  if (seconds == null) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d ${Math.floor((seconds % 86_400) / 3600)} h`;
}

export const date = (seconds: number) => dateTime.format(seconds * 1000);
export const dayOf = (seconds: number) => day.format(seconds * 1000);
export const clockOf = (seconds: number) => clock.format(seconds * 1000);
export const clockWithSecondsOf = (seconds: number) => clockWithSeconds.format(seconds * 1000);

export function ago(seconds: number): string {
  const passed = seconds - Date.now() / 1000;
  const steps: [Intl.RelativeTimeFormatUnit, number][] = [
    ["year", 31_536_000],
    ["month", 2_592_000],
    ["day", 86_400],
    ["hour", 3600],
    ["minute", 60],
  ];
  for (const [unit, length] of steps) {
    if (Math.abs(passed) >= length) return relative.format(Math.round(passed / length), unit);
  }
  return "just now";
}

/** An amount with all digits that matter, in its currency. */
export function money(amount: number, currency: string | null | undefined): string {
  if (!currency || currency.toUpperCase() === "XXX") return count(amount);
  const digits = amount !== 0 && Math.abs(amount) < 1 ? 6 : 2;
  const style = { style: "currency", currency: currency.toUpperCase(), maximumFractionDigits: digits } as const;
  return new Intl.NumberFormat(undefined, style).format(amount);
}

/** The name without its tenant: `upper` of `acme/upper`. */
export const localName = (name: string) => name.slice(name.indexOf("/") + 1);
