// Who is signed in, and which tenant an operator looks at.
import { useDebouncedValue } from "@mantine/hooks";
import { keepPreviousData, useQuery, useQueryClient, type QueryClient } from "@tanstack/react-query";
import { createContext, useContext, useEffect, useState, type ReactNode } from "react";
import { api, ApiError, caller, unwrap, type SessionObject } from "./api/client";

interface SessionState {
  session: SessionObject;
  /** The tenant whose pages are shown. */
  tenant: string;
  viewing: string | null;
  /** Whether the session may do this to the tenant that is shown. */
  can: (scope: string) => boolean;
  isOperator: boolean;
  view: (tenant: string | null) => Promise<void>;
  signOut: (everywhere?: boolean) => Promise<void>;
}

const Context = createContext<SessionState | null>(null);
const VIEWING = "loramux-viewing";

export function useSession(): SessionState {
  const state = useContext(Context);
  if (state === null) throw new Error("outside of a session");
  return state;
}

/** Forget what was read for another session or tenant. */
export function forgetAll(queries: QueryClient) {
  queries.removeQueries({ predicate: (query) => query.queryKey[0] !== "session" });
}

/** The session of the browser's cookie; null where there is none. */
export function useSessionQuery() {
  return useQuery({
    queryKey: ["session"],
    queryFn: async () => {
      try {
        const session = await unwrap(api.GET("/console/session"));
        caller.csrfToken = session.csrf_token;
        return session;
      } catch (error) {
        if (error instanceof ApiError && [401, 403].includes(error.status)) return null;
        throw error;
      }
    },
    refetchInterval: 60_000,
    staleTime: 30_000,
  });
}

export function SessionProvider(properties: { session: SessionObject; children: ReactNode }) {
  const { session, children } = properties;
  const queries = useQueryClient();
  const kept = sessionStorage.getItem(VIEWING);
  const [viewing, setViewing] = useState(kept && session.viewed.includes(kept) ? kept : null);
  caller.viewing = viewing;

  useEffect(() => {
    caller.onSignedOut = () => queries.setQueryData(["session"], null);
  }, [queries]);

  const isOperator = session.scopes.includes("operator");
  const state: SessionState = {
    session,
    viewing,
    tenant: viewing ?? session.tenant,
    isOperator,
    can: (scope) => viewing === null && session.scopes.includes(scope),
    view: async (tenant) => {
      if (tenant !== null) {
        const body = { tenant };
        queries.setQueryData(["session"], await unwrap(api.POST("/console/views", { body })));
        sessionStorage.setItem(VIEWING, tenant);
      } else {
        sessionStorage.removeItem(VIEWING);
      }
      caller.viewing = tenant;
      forgetAll(queries);
      setViewing(tenant);
    },
    signOut: async (everywhere = false) => {
      await unwrap(api.DELETE("/console/session", { params: { query: { everywhere } } }));
      sessionStorage.removeItem(VIEWING);
      forgetAll(queries);
      queries.setQueryData(["session"], null);
    },
  };
  return <Context value={state}>{children}</Context>;
}

const MOST_NAMES = 100;

/** Whether prompts of a model may have images; undefined until the server has said so. Revisions and aliases read what their adapter reads. */
export function useReadsImages(name: string): boolean | undefined {
  const { session, tenant } = useSession();
  const model = session.base_models.includes(name) ? name : name.replace(/[@:][^/]*$/, "");
  const found = useQuery({
    queryKey: ["model", tenant, model],
    queryFn: () => unwrap(api.GET("/v1/models/{name}", { params: { path: { name: model } } })),
    enabled: model !== "",
    retry: false,
  });
  return found.data?.input_modalities.includes("image");
}

/** Names of models with this text in them, of which there may be ten thousand; undefined until the first names are known. */
export function useModelNames(search: string): string[] | undefined {
  const { tenant } = useSession();
  const [typed] = useDebouncedValue(search.trim().slice(0, 64), 200);
  const models = useQuery({
    queryKey: ["models", tenant, typed],
    queryFn: () => unwrap(api.GET("/v1/models", { params: { query: { search: typed || undefined, limit: MOST_NAMES } } })),
    placeholderData: keepPreviousData,
  });
  return models.isPending ? undefined : (models.data?.data ?? []).map((model) => model.id);
}
