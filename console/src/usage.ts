// Usage and costs by time, whole spans of it: the API answers in pages.
import { read, type UsageResult } from "./api/client";

export interface Bucket<T> {
  start_time: number;
  end_time: number;
  results: T[];
}

export interface CostResult {
  amount: { value: number; currency: string };
  line_item: string | null;
  model: string | null;
  project_id: string | null;
  api_key_id: string | null;
}

interface Page<T> {
  data: Bucket<T>[];
  has_more: boolean;
  next_page: string | null;
}

export const HOUR = 3600;
export const DAY = 86_400;

async function all<T>(path: string, query: Record<string, string | number | string[]>): Promise<Bucket<T>[]> {
  const found: Bucket<T>[] = [];
  let page: string | null = null;
  do {
    const answer: Page<T> = await read(path, page === null ? query : { ...query, page });
    found.push(...answer.data);
    page = answer.has_more ? answer.next_page : null;
  } while (page !== null);
  return found;
}

/** The groups of a query: of thousands of models, those with the most tokens by name, fewer where there are more days. */
function grouping(days: number, groupBy: string[]) {
  if (groupBy.length === 0) return {};
  return { group_by: groupBy, ...(groupBy.includes("model") && { top_models: days > 31 ? 20 : 100 }) };
}

/** Usage of so many days up to now, by hour up to three days, else by day. */
export function usageOf(days: number, groupBy: string[]) {
  const width = days <= 3 ? HOUR : DAY;
  const end = Math.ceil(Date.now() / 1000 / width) * width;
  return all<UsageResult>("/v1/organization/usage/completions", {
    start_time: end - days * DAY,
    end_time: end,
    bucket_width: width === HOUR ? "1h" : "1d",
    limit: width === HOUR ? 72 : 31,
    ...grouping(days, groupBy),
  });
}

/** Costs by day (UTC). */
export function costsOf(days: number, groupBy: string[]) {
  const end = Math.ceil(Date.now() / 1000 / DAY) * DAY;
  return all<CostResult>("/v1/organization/costs", {
    start_time: end - Math.max(1, days) * DAY,
    end_time: end,
    limit: 31,
    ...grouping(days, groupBy),
  });
}
