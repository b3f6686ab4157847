// Upload of one revision: files are hashed here, sent with their progress, checked at the server, and reported in words.
import { Alert, Badge, Button, Checkbox, Group, List, Modal, Progress, Stack, Text, TextInput, ThemeIcon } from "@mantine/core";
import { Dropzone } from "@mantine/dropzone";
import { IconCheck, IconFile, IconFileUpload, IconMinus, IconX } from "@tabler/icons-react";
import { useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { Link } from "wouter";
import { api, ApiError, headersFor, refusal, unwrap, type UploadObject } from "../api/client";
import * as format from "../format";
import { useSession } from "../session";

const CONFIG = "adapter_config.json";
const NEEDED = [CONFIG, "adapter_model.safetensors"];
const NAME = /^[a-z0-9][a-z0-9._-]{0,62}$/;
const POLL_MS = 500;

interface Check {
  name: string;
  outcome: "passed" | "failed" | "not_run";
  detail: string;
}

interface Report {
  checks: Check[];
  base_model: string | null;
  warnings: { code: string; message: string }[];
}

type Phase = { kind: "choose" } | { kind: "send"; doing: string; done: number } | { kind: "ended"; upload: UploadObject };

export default function Upload({ adapter, onClose }: { adapter?: string; onClose: () => void }) {
  const { tenant } = useSession();
  const [name, setName] = useState(adapter ?? "");
  const [files, setFiles] = useState<File[]>([]);
  const [promote, setPromote] = useState(true);
  const [phase, setPhase] = useState<Phase>({ kind: "choose" });
  const [problem, setProblem] = useState<string | null>(null);
  const queries = useQueryClient();
  const missing = NEEDED.filter((needed) => !files.some((file) => file.name === needed));
  const isNamed = NAME.test(name);

  async function start() {
    setProblem(null);
    const show = (doing: string, done: number) => setPhase({ kind: "send", doing, done });
    try {
      const upload = await send(name, files, promote, show);
      setPhase({ kind: "ended", upload });
      await queries.invalidateQueries();
    } catch (error) {
      setProblem((error as Error).message);
      setPhase({ kind: "choose" });
    }
  }

  const title = adapter ? `New revision of ${adapter}` : "Upload an adapter";
  return (
    <Modal opened onClose={onClose} title={<Text fw={600}>{title}</Text>} size="lg">
      {phase.kind === "choose" && (
        <Stack>
          {problem && (
            <Alert color="red" role="alert" title="The upload did not go through">
              {problem}
            </Alert>
          )}
          <TextInput
            label="Name"
            description={`Requests call it as ${tenant}/${name || "name"}`}
            value={name}
            disabled={adapter !== undefined}
            error={name && !isNamed ? "1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or a digit" : undefined}
            onChange={(event) => setName(event.currentTarget.value)}
            required
          />
          <Dropzone
            onDrop={(dropped) => setFiles((before) => [...before.filter((old) => !dropped.some((file) => file.name === old.name)), ...dropped])}
            className="drop"
            inputProps={{ "aria-label": "Files of the adapter" }}
          >
            <Group justify="center" gap="md" mih="7rem" className="long">
              <IconFileUpload size={36} stroke={1.4} aria-hidden />
              <div>
                <Text fw={550}>Drop the adapter's files here, or choose them</Text>
                <Text size="sm" c="dimmed">
                  {NEEDED.join(" and ")}, as save_pretrained writes them
                </Text>
              </div>
            </Group>
          </Dropzone>
          {files.length > 0 && (
            <List spacing={4} size="sm" icon={<IconFile size={16} />}>
              {files.map((file) => (
                <List.Item key={file.name}>
                  {file.name} <Text span c="dimmed" size="sm">{format.bytes(file.size)}</Text>
                </List.Item>
              ))}
            </List>
          )}
          {files.length > 0 && missing.length > 0 && (
            <Text size="sm" c="orange">
              Still missing: {missing.join(", ")}
            </Text>
          )}
          {adapter && (
            <Checkbox
              label="Answer with it at once"
              description="Without this, the default alias stays where it is, and you can release the revision as a canary."
              checked={promote}
              onChange={(event) => setPromote(event.currentTarget.checked)}
            />
          )}
          <Group justify="flex-end">
            <Button variant="default" onClick={onClose}>
              Cancel
            </Button>
            <Button disabled={!isNamed || missing.length > 0} onClick={() => void start()}>
              Upload
            </Button>
          </Group>
        </Stack>
      )}
      {phase.kind === "send" && (
        <Stack py="xl" role="status">
          <Group justify="space-between">
            <Text size="sm">{phase.doing}</Text>
            <Text size="sm" className="figure">
              {format.share(phase.done)}
            </Text>
          </Group>
          <Progress value={phase.done * 100} aria-label={phase.doing} animated />
        </Stack>
      )}
      {phase.kind === "ended" && <Outcome upload={phase.upload} again={() => setPhase({ kind: "choose" })} onClose={onClose} />}
    </Modal>
  );
}

function Outcome({ upload, again, onClose }: { upload: UploadObject; again: () => void; onClose: () => void }) {
  const report = upload.report as Report | null;
  const isReady = upload.state === "ready";
  return (
    <Stack>
      <Alert
        color={isReady ? "teal" : "red"}
        icon={isReady ? <IconCheck /> : <IconX />}
        title={isReady ? `${upload.revision} is ready` : "The adapter was rejected"}
        role={isReady ? "status" : "alert"}
      >
        {isReady
          ? upload.promote
            ? "Requests to its name are answered by it from now on."
            : "It answers to its number. Release it from the adapter's page."
          : (upload.error?.message ?? "The upload has expired.")}
      </Alert>
      {report?.warnings.map((warning) => (
        <Alert key={warning.code + warning.message} color="yellow">
          {warning.message}
        </Alert>
      ))}
      {report && <Checks checks={report.checks} />}
      <Group justify="flex-end">
        {!isReady && (
          <Button variant="default" onClick={again}>
            Try other files
          </Button>
        )}
        {isReady && (
          <Button component={Link} href={`/adapters/${format.localName(upload.adapter)}`} variant="default">
            Open the adapter
          </Button>
        )}
        <Button onClick={onClose}>Done</Button>
      </Group>
    </Stack>
  );
}

export function Checks({ checks }: { checks: Check[] }) {
  const pictures = { passed: [IconCheck, "teal"], failed: [IconX, "red"], not_run: [IconMinus, "gray"] } as const;
  return (
    <Stack gap={6} component="section" aria-label="Checks">
      {checks.map((check) => {
        const [Picture, color] = pictures[check.outcome];
        return (
          <Group key={check.name} gap="sm" wrap="nowrap" align="flex-start">
            <ThemeIcon size={20} radius="xl" color={color} variant="light" aria-hidden>
              <Picture size={13} />
            </ThemeIcon>
            <Text size="sm" className="long">
              {check.name.replaceAll("_", " ")}
              {check.detail && (
                <Text span c="dimmed" size="sm">
                  {" "}
                  {check.detail}
                </Text>
              )}
            </Text>
            <Badge size="xs" color={color} ml="auto">
              {check.outcome.replace("_", " ")}
            </Badge>
          </Group>
        );
      })}
    </Stack>
  );
}

async function send(name: string, files: File[], promote: boolean, show: (doing: string, done: number) => void): Promise<UploadObject> {
  const announced: Record<string, { size: number; sha256: string }> = {};
  for (const [place, file] of files.entries()) {
    show(`Reading ${file.name}`, (place / files.length) * 0.1);
    announced[file.name] = { size: file.size, sha256: await sha256(file) };
  }
  const opened = await unwrap(api.POST("/v1/uploads", { body: { adapter: name, files: announced, promote } }));
  const whole = opened.files.reduce((sum, file) => sum + file.size, 0);
  let before = 0;
  for (const wanted of opened.files) {
    const file = files.find((one) => one.name === wanted.name)!;
    await put(`/v1/uploads/${opened.id}/files/${encodeURIComponent(wanted.name)}`, file, (sent) => {
      show(`Sending ${wanted.name}`, 0.1 + (0.8 * (before + sent)) / whole);
    });
    before += wanted.size;
  }
  show("Checking the files", 0.92);
  const path = { upload_id: opened.id };
  let upload = await unwrap(api.POST("/v1/uploads/{upload_id}/complete", { params: { path } }));
  while (upload.state === "validating" || upload.state === "uploading") {
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    upload = await unwrap(api.GET("/v1/uploads/{upload_id}", { params: { path } }));
  }
  return upload;
}

async function sha256(file: File): Promise<string> {
  if (!crypto.subtle) throw new ApiError("Uploading from a browser needs https, or an address on this machine.", 0);
  const digest = await crypto.subtle.digest("SHA-256", await file.arrayBuffer());
  return [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** PUT with progress, which fetch does not tell of an upload. */
function put(url: string, file: File, onProgress: (sent: number) => void): Promise<void> {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", url);
    for (const [name, value] of Object.entries(headersFor("PUT"))) request.setRequestHeader(name, value);
    request.setRequestHeader("Content-Type", "application/octet-stream");
    request.responseType = "json";
    request.upload.onprogress = (event) => onProgress(event.loaded);
    request.onload = () => (request.status < 300 ? resolve() : reject(refusal(request.response, request.status)));
    request.onerror = () => reject(new ApiError("The connection broke. Upload again; nothing is half there.", 0));
    request.send(file);
  });
}
