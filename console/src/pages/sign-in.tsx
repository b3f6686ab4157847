import { Alert, Button, Card, Center, Code, Group, PasswordInput, Stack, Text, Title } from "@mantine/core";
import { useQueryClient } from "@tanstack/react-query";
import { useState, type FormEvent } from "react";
import { api, ApiError, caller, unwrap } from "../api/client";
import { forgetAll } from "../session";

const LINK = "#sign-in=";
const NOT_KEPT =
  "Your browser did not keep the sign-in. The console needs https, or an address on this machine (http://localhost).";

/** Signs in with a key or, where the address has one, with the secret of a sign-in link. */
export function SignIn() {
  const [link] = useState(() => {
    const secret = location.hash.startsWith(LINK) ? location.hash.slice(LINK.length) : null;
    if (secret !== null) history.replaceState(null, "", location.pathname);
    return secret;
  });
  const [isLinkUsed, setLinkUsed] = useState(false);
  const [key, setKey] = useState("");
  const [refusal, setRefusal] = useState<string | null>(null);
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
