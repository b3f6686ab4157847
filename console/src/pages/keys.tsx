import { Button } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { IconKey, IconPlus } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { allKeys, api, unwrap, type KeyObject } from "../api/client";
import { isActive, KeyRows, MakeKey, RevokeKey, RotateKey } from "../components/keys";
import { Actions, Empty, Loaded, Page, Section } from "../components/ui";
import { useModelNames, useSession } from "../session";

export default function Keys() {
  const { can } = useSession();
  const [isMaking, make] = useDisclosure();
  const keys = useQuery({ queryKey: ["keys"], queryFn: () => allKeys(), refetchInterval: 20_000 });
  const action = can("keys") && (
    <Button leftSection={<IconPlus size={16} />} onClick={make.open}>
      Make a key
    </Button>
  );
  return (
    <Page title="Keys" about="A key has scopes, a project and perhaps a list of models. Its secret is shown once." actions={action}>
      {isMaking && <Make onClose={make.close} />}
      <Section title="All keys">
        <Loaded query={keys}>
          {(found) =>
            found.length === 0 ? (
              <Empty icon={IconKey} title="No key yet" action={action}>
                Make one for each service that calls this server, with no more scopes than it needs.
              </Empty>
            ) : (
              <KeyRows rows={[...found].reverse()} actions={(key) => can("keys") && isActive(key) && <Change apiKey={key} />} />
            )
          }
        </Loaded>
      </Section>
    </Page>
  );
}

function Change({ apiKey }: { apiKey: KeyObject }) {
  const queries = useQueryClient();
  const params = { path: { key_id: apiKey.id } };
  const changed = () => queries.invalidateQueries({ queryKey: ["keys"] });
  return (
    <Actions>
      <RotateKey
        apiKey={apiKey}
        rotate={(overlap_seconds) => unwrap(api.POST("/v1/keys/{key_id}/rotate", { params, body: { overlap_seconds } }))}
        changed={changed}
      />
      <RevokeKey apiKey={apiKey} revoke={() => unwrap(api.DELETE("/v1/keys/{key_id}", { params }))} changed={changed} />
    </Actions>
  );
}

function Make({ onClose }: { onClose: () => void }) {
  const { session } = useSession();
  const queries = useQueryClient();
  const projects = useQuery({ queryKey: ["projects"], queryFn: () => unwrap(api.GET("/v1/projects")) });
  const [search, setSearch] = useState("");
  const names = useModelNames(search) ?? [];
  return (
    <MakeKey
      title="Make a key"
      scopes={session.scopes.filter((scope) => scope !== "operator")}
      projects={(projects.data?.data ?? []).filter((one) => one.archived_at === null).map((one) => one.name)}
      models={{ names, search, setSearch }}
      create={(body) => unwrap(api.POST("/v1/keys", { body }))}
      changed={() => queries.invalidateQueries({ queryKey: ["keys"] })}
      onClose={onClose}
    />
  );
}
