// A button that sends a file of JSON lines to the server.
import { Button, FileButton } from "@mantine/core";
import { IconFileUpload } from "@tabler/icons-react";
import { useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { headersFor, refusal } from "../api/client";
import { complain, report } from "./ui";

interface Properties {
  label: string;
  purpose: string;
  /** What the reader can do with the file now. */
  next: string;
  variant?: string;
}

export function SendFile({ label, purpose, next, variant }: Properties) {
  const queries = useQueryClient();
  const [isBusy, setBusy] = useState(false);
  async function send(file: File | null) {
    if (file === null) return;
    setBusy(true);
    try {
      const form = new FormData();
      form.append("purpose", purpose);
      form.append("file", file);
      const answer = await fetch("/v1/files", { method: "POST", body: form, headers: headersFor("POST") });
      if (!answer.ok) throw refusal(await answer.json().catch(() => null), answer.status);
      report(`${file.name} is there: ${next}`);
      await queries.invalidateQueries({ queryKey: ["files"] });
    } finally {
      setBusy(false);
    }
  }
  return (
    <FileButton onChange={(file) => void send(file).catch(complain)} accept=".jsonl,application/jsonl">
      {(button) => (
        <Button {...button} loading={isBusy} variant={variant} leftSection={<IconFileUpload size={16} />}>
          {label}
        </Button>
      )}
    </FileButton>
  );
}
