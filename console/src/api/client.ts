// The API as its OpenAPI document describes it: `npm run types` writes schema.d.ts, and a call that the document does
// not know does not compile.
import createClient, { type Middleware } from "openapi-fetch";
import type { Adapter, KeyObject, paths } from "./schema";

export type * from "./schema";

const CSRF_HEADER = "X-CSRF-Token";
const VIEW_HEADER = "X-View-Tenant";
const SAFE_METHODS = ["GET", "HEAD"];

/** A refusal of the server, in its own words. */
export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly code: string | null = null,
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

interface Caller {
  csrfToken: string;
  /** The tenant that an operator looks at, read-only. */
  viewing: string | null;
  /** Called when the server no longer knows the session. */
  onSignedOut: () => void;
}

export const caller: Caller = { csrfToken: "", viewing: null, onSignedOut: () => {} };

/** The headers of a request that does not go through `api`. */
export function headersFor(method: string): Record<string, string> {
  const headers: Record<string, string> = {};
  if (!SAFE_METHODS.includes(method)) headers[CSRF_HEADER] = caller.csrfToken;
  if (caller.viewing) headers[VIEW_HEADER] = caller.viewing;
  return headers;
}

const authenticate: Middleware = {
  onRequest({ request, schemaPath }) {
    const isAboutTenant = schemaPath.startsWith("/v1/");
    if (!SAFE_METHODS.includes(request.method)) request.headers.set(CSRF_HEADER, caller.csrfToken);
    if (caller.viewing && isAboutTenant) request.headers.set(VIEW_HEADER, caller.viewing);
    return request;
  },
};

export const api = createClient<paths>({ baseUrl: "/", credentials: "same-origin" });
api.use(authenticate);

/** A page of adapters; the document loses what its items are. */
export const adaptersOf = (page: { data: unknown[] }) => page.data as Adapter[];

interface KeyPage {
  data: KeyObject[];
  has_more: boolean;
  last_id: string | null;
}

/** All keys, oldest first: the caller's tenant's, or those of the tenant that an operator names. The API lists 500 at once. */
export async function allKeys(tenant?: string): Promise<KeyObject[]> {
  const keys: KeyObject[] = [];
  let after: string | undefined;
  do {
    const query = { after };
    const answering = tenant === undefined ? api.GET("/v1/keys", { params: { query } }) : api.GET("/admin/tenants/{name}/keys", { params: { path: { name: tenant }, query } });
    const page = (await unwrap(answering)) as KeyPage;
    keys.push(...page.data);
    after = (page.has_more && page.last_id) || undefined;
  } while (after !== undefined);
  return keys;
}

interface Answer<T> {
  data?: T;
  error?: unknown;
  response: Response;
}

/** Return the answer's data, or throw the server's refusal. */
export async function unwrap<T>(answering: Promise<Answer<T>>): Promise<T> {
  let answer: Answer<T>;
  try {
    answer = await answering;
  } catch {
    throw new ApiError("The server does not answer. Check your connection; this page tries again.", 0, "unreachable");
  }
  if (answer.error !== undefined || !answer.response.ok) throw refusal(answer.error, answer.response.status);
  return answer.data as T;
}

/** Return the error of a body: OpenAI's shape, or RFC 9457's under /admin. */
export function refusal(body: unknown, status: number): ApiError {
  const whole = (body ?? {}) as { error?: { message?: string; code?: string; param?: string }; detail?: string };
  const message = whole.error?.message ?? whole.detail ?? `The server answered ${status}.`;
  const refused = new ApiError(message, status, whole.error?.code ?? null, whole.error?.param ?? null);
  if (status === 401) caller.onSignedOut();
  return refused;
}

/** Read a path whose query the OpenAPI document leaves open (repeated group_by), or whose answer has no schema. */
export async function read<T>(path: string, query: Record<string, string | number | string[]> = {}): Promise<T> {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) given.append(name, String(one));
  }
  const response = await fetch(`${path}?${given}`, { headers: headersFor("GET") });
  if (!response.ok) throw refusal(await response.json().catch(() => null), response.status);
  return (await response.json()) as T;
}
