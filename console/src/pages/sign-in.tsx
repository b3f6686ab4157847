import { Alert, Button, Card, Center, Code, Divider, Group, PasswordInput, Stack, Text, Title } from "@mantine/core";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent } from "react";
import { api, ApiError, caller, unwrap } from "../api/client";
import { forgetAll } from "../session";

const NOT_KEPT =
  "Your browser did not keep the sign-in. The console needs https, or an address on this machine (http://localhost).";

/** Why an identity provider's answer signed nobody in: codes of the server's redirect. */
const REFUSALS: Record<string, string> = {
  sign_in_expired: "That sign-in was not begun in this browser, or took longer than ten minutes. Begin again.",
  sign_in_denied: "The identity provider did not sign you in.",
  sign_in_refused: "The identity provider's answer did not pass this server's checks. Begin again; if it stays so, tell your operator.",
  issuer_unreachable: "The identity provider does not answer. Try again in a moment.",
  not_a_member: "The identity provider knows you, but no tenant here has you as a member. Ask an owner of your tenant to add you.",
  tenant_suspended: "Your tenant is suspended. Talk to your operator.",
  still_needed: "You are signed in too often. Sign out everywhere in another browser.",
};

/** Take what the address says behind its `#`, once. */
function takeFragment(): URLSearchParams {
  const said = new URLSearchParams(location.hash.slice(1));
  if (["sign-in", "refused", "tenant"].some((name) => said.has(name))) history.replaceState(null, "", location.pathname);
  return said;
}

/** Signs in at an identity provider, with a key or, where the address has one, with the secret of a sign-in link. */
export function SignIn() {
  const [said] = useState(takeFragment);
  const link = said.get("sign-in");
  const [isLinkUsed, setLinkUsed] = useState(false);
  const [key, setKey] = useState("");
  const reason = said.get("refused");
  const [refusal, setRefusal] = useState<string | null>(reason && (REFUSALS[reason] ?? "The sign-in was refused."));
  const [isBusy, setBusy] = useState(false);
  const queries = useQueryClient();

  async function signIn(body: { key?: string; link?: string }) {
    setBusy(true);
    setRefusal(null);
    try {
      await unwrap(api.POST("/console/session", { body }));
      const session = await unwrap(api.GET("/console/session")).catch((error: unknown) => {
        throw error instanceof ApiError && error.status === 401 ? new Error(NOT_KEPT) : error;
      });
      caller.csrfToken = session.csrf_token;
      forgetAll(queries);
      queries.setQueryData(["session"], session);
    } catch (error) {
      setRefusal((error as Error).message);
      setLinkUsed(body.link !== undefined);
    } finally {
      setBusy(false);
    }
  }

  function submit(event: FormEvent) {
    event.preventDefault();
    void signIn({ key: key.trim() });
  }

  const withLink = link !== null && !isLinkUsed;
  return (
    <Center mih="100vh" p="md" component="main">
      <Card w="100%" maw={420} padding="xl">
        <Stack>
          <Group gap="sm">
            <img src="/console/icon.svg" width={36} height={36} alt="" />
            <div>
              <Title order={1} size="h3">
                loramux console
              </Title>
              <Text size="sm" c="dimmed">
                {location.host}
              </Text>
            </div>
          </Group>
          {refusal && (
            <Alert color="red" role="alert">
              {refusal}
            </Alert>
          )}
          {!withLink && <Providers issuer={said.get("issuer")} tenants={said.getAll("tenant")} refuse={setRefusal} />}
          {withLink ? (
            <>
              <Text size="sm">This link signs you in. It works once. Continue only if you made it, or expected it.</Text>
              <Button onClick={() => void signIn({ link })} loading={isBusy} data-autofocus>
                Sign in with this link
              </Button>
            </>
          ) : (
            <form onSubmit={submit}>
              <Stack>
                <PasswordInput
                  label="API key"
                  description="You get what the key may do: its scopes, its project, its models."
                  placeholder="sk-lm-…"
                  value={key}
                  onChange={(event) => setKey(event.currentTarget.value)}
                  autoComplete="current-password"
                  required
                />
                <Button type="submit" loading={isBusy} disabled={!key.trim()}>
                  Sign in
                </Button>
              </Stack>
            </form>
          )}
          <Text size="xs" c="dimmed">
            No key yet? An operator makes one: <Code>loramux key create --tenant NAME</Code>
          </Text>
        </Stack>
      </Card>
    </Center>
  );
}

/** Buttons to the identity providers; for a member of several tenants, one for each of them. */
function Providers({ issuer, tenants, refuse }: { issuer: string | null; tenants: string[]; refuse: (why: string) => void }) {
  const [going, setGoing] = useState<string | null>(null);
  const providers = useQuery({ queryKey: ["session", "providers"], queryFn: () => unwrap(api.GET("/console/oidc/providers")), staleTime: Infinity });
  const found = providers.data?.data ?? [];
  if (found.length === 0) return null;
  const choosing = issuer !== null && tenants.length > 0;

  async function begin(body: { issuer: string; tenant?: string }) {
    setGoing(body.tenant ?? body.issuer);
    try {
      location.assign((await unwrap(api.POST("/console/oidc", { body }))).location);
    } catch (error) {
      refuse((error as Error).message);
      setGoing(null);
    }
  }

  return (
    <Stack>
      {choosing && <Text size="sm">You are a member of several tenants. Which one?</Text>}
      {choosing
        ? tenants.map((tenant) => (
            <Button key={tenant} variant="default" loading={going === tenant} onClick={() => void begin({ issuer, tenant })}>
              {tenant}
            </Button>
          ))
        : found.map((one) => (
            <Button key={one.issuer} variant="default" loading={going === one.issuer} onClick={() => void begin({ issuer: one.issuer })}>
              Sign in with {one.label}
            </Button>
          ))}
      <Divider label="or with a key" />
    </Stack>
  );
}
