import { Button, Group, Stack, Switch, Text, TextInput } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconPlus, IconWebhook } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { api, unwrap, type WebhookObject } from "../api/client";
import { complain, Confirm, DataTable, Dialog, Empty, Loaded, Page, report, SecretDialog, Section, State, When } from "../components/ui";
import { useSession } from "../session";

export default function Webhooks() {
  const { can } = useSession();
  const [isMaking, make] = useDisclosure();
  const webhooks = useQuery({ queryKey: ["webhooks"], queryFn: () => unwrap(api.GET("/v1/webhooks")), refetchInterval: 15_000 });
  const action = can("webhooks") && (
    <Button leftSection={<IconPlus size={16} />} onClick={make.open}>
      Add a webhook
    </Button>
  );
  return (
    <Page title="Webhooks" about="Signed messages about uploads, releases and canaries, as in standardwebhooks.com." actions={action}>
      {isMaking && <Make onClose={make.close} />}
      <Loaded query={webhooks}>
        {(found) =>
          found.data.length === 0 ? (
            <Section title="All webhooks">
              <Empty icon={IconWebhook} title="No webhook yet" action={action}>
                Add the address of a service of yours, and it is told when an upload is ready or a canary is taken back.
              </Empty>
            </Section>
          ) : (
            <Stack gap="lg">
              {found.data.map((webhook) => (
                <Webhook key={webhook.id} webhook={webhook} mayChange={can("webhooks")} />
              ))}
            </Stack>
          )
        }
      </Loaded>
    </Page>
  );
}

function Webhook({ webhook, mayChange }: { webhook: WebhookObject; mayChange: boolean }) {
  const queries = useQueryClient();
  const path = { webhook_id: webhook.id };
  const deliveries = useQuery({
    queryKey: ["webhooks", webhook.id],
    queryFn: () => unwrap(api.GET("/v1/webhooks/{webhook_id}/deliveries", { params: { path, query: { limit: 20 } } })),
    refetchInterval: 10_000,
  });
  async function test() {
    const tried = await unwrap(api.POST("/v1/webhooks/{webhook_id}/test", { params: { path } }));
    if (tried.delivered) report(`Delivered in ${tried.milliseconds} ms, status ${tried.status}`);
    else complain(new Error(tried.error ?? `It answered ${tried.status}`));
  }
  async function enable(enabled: boolean) {
    await unwrap(api.PATCH("/v1/webhooks/{webhook_id}", { params: { path }, body: { enabled } }));
    await queries.invalidateQueries({ queryKey: ["webhooks"] });
  }
  return (
    <Section
      title={webhook.url}
      about={webhook.disabled_because ?? `${webhook.events.length} kinds of events`}
      actions={
        mayChange && (
          <Group gap="sm">
            <Switch label="Enabled" checked={webhook.enabled} onChange={(event) => void enable(event.currentTarget.checked).catch(complain)} />
            <Button size="xs" variant="default" onClick={() => void test().catch(complain)}>
              Send a test
            </Button>
            <Confirm
              label="Delete"
              title="Delete the webhook?"
              act={async () => {
                await unwrap(api.DELETE("/v1/webhooks/{webhook_id}", { params: { path } }));
                await queries.invalidateQueries({ queryKey: ["webhooks"] });
              }}
            >
              Pending deliveries are dropped.
            </Confirm>
          </Group>
        )
      }
    >
      <Loaded query={deliveries} height={100}>
        {(found) =>
          found.data.length === 0 ? (
            <Text size="sm" c="dimmed">
              No deliveries yet.
            </Text>
          ) : (
            <DataTable
              label={`Deliveries to ${webhook.url}`}
              rows={found.data}
              keyOf={(one) => one.event.id}
              columns={[
                { title: "Event", width: 180, cell: (one) => one.event.type },
                { title: "About", cell: (one) => one.event.data.model ?? one.event.data.adapter ?? "" },
                { title: "State", cell: (one) => <State value={one.state} /> },
                { title: "Failed attempts", number: true, cell: (one) => one.attempts },
                { title: "Answer", cell: (one) => one.error ?? one.status ?? "–" },
                { title: "When", number: true, cell: (one) => <When at={one.updated_at} /> },
              ]}
            />
          )
        }
      </Loaded>
    </Section>
  );
}

function Make({ onClose }: { onClose: () => void }) {
  const queries = useQueryClient();
  const [url, setUrl] = useState("");
  const [made, setMade] = useState<WebhookObject | null>(null);
  async function create() {
    setMade(await unwrap(api.POST("/v1/webhooks", { body: { url: url.trim() } })));
    await queries.invalidateQueries({ queryKey: ["webhooks"] });
  }
  if (made) {
    const about = "Your service checks the signatures with it. It cannot be shown again.";
    return <SecretDialog title="The webhook's secret" secret={made.secret ?? ""} about={about} onClose={onClose} />;
  }
  return (
    <Dialog title="Add a webhook" submit="Add" disabled={!url.trim()} act={create} onClose={onClose} stays>
      <TextInput label="Address" placeholder="https://example.com/hooks/loramux" value={url} onChange={(event) => setUrl(event.currentTarget.value)} required data-autofocus />
    </Dialog>
  );
}
