// The images of a prompt: chosen or pasted, compared with the server's bounds, and shown before they are sent.
import { ActionIcon, Button, FileButton, Group, Image, Paper, Text } from "@mantine/core";
import { IconPhotoPlus, IconX } from "@tabler/icons-react";
import { useEffect, useRef, useState } from "react";
import type { ImageBounds } from "../api/client";
import * as format from "../format";

const mediaTypes = (bounds: ImageBounds) => bounds.formats.map((one) => `image/${one.toLowerCase()}`);

/** Why the server would refuse these files; null if their number, formats and sizes are within its bounds. */
export function problemOf(files: File[], bounds: ImageBounds): string | null {
  const types = mediaTypes(bounds);
  const other = files.find((file) => !types.includes(file.type));
  if (other) return `${other.name} is none of ${bounds.formats.join(", ")}. Remove it.`;
  const large = files.find((file) => file.size > bounds.max_bytes);
  if (large) return `${large.name} has ${format.count(large.size)} bytes, and the maximum is ${format.count(bounds.max_bytes)}. Remove it.`;
  if (files.length > bounds.max_per_request) return `A request has at most ${bounds.max_per_request} images, and these are ${files.length}. Remove some.`;
  const total = files.reduce((sum, file) => sum + file.size, 0);
  if (total > bounds.max_request_bytes) return `The images have ${format.count(total)} bytes together, and the maximum is ${format.count(bounds.max_request_bytes)}. Remove some.`;
  return null;
}

export const dataUrlOf = (file: File) =>
  new Promise<string>((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error(`${file.name} cannot be read: ${reader.error!.message}`));
    reader.readAsDataURL(file);
  });

export function ImagePicker({ bounds, onAdd }: { bounds: ImageBounds; onAdd: (files: File[]) => void }) {
  const reset = useRef<() => void>(null);
  function add(files: File[]) {
    onAdd(files);
    reset.current?.(); // so that a removed file can be chosen again
  }
  return (
    <Group gap="sm">
      <FileButton multiple accept={mediaTypes(bounds).join(",")} resetRef={reset} onChange={add}>
        {(button) => (
          <Button {...button} size="xs" variant="default" leftSection={<IconPhotoPlus size={16} />}>
            Add images
          </Button>
        )}
      </FileButton>
      <Text size="sm" c="dimmed" className="long" flex="1 1 200px">
        Or paste them into the prompt: {bounds.formats.join(", ")}, up to {bounds.max_per_request} images, {format.bytes(bounds.max_bytes)} each and{" "}
        {format.bytes(bounds.max_request_bytes)} together.
      </Text>
    </Group>
  );
}

export function Thumbnails({ files, bounds, onRemove }: { files: File[]; bounds: ImageBounds; onRemove: (place: number) => void }) {
  return (
    <Group gap="sm" role="list" aria-label="Images of the prompt">
      {files.map((file, place) => (
        <Paper key={place} withBorder p={6} role="listitem">
          <Group gap="xs" wrap="nowrap">
            <Thumbnail file={file} isShown={problemOf([file], bounds) === null} />
            <div>
              <Text size="sm" maw={160} truncate>
                {file.name}
              </Text>
              <Text size="xs" c="dimmed">
                {format.bytes(file.size)}
              </Text>
            </div>
            <ActionIcon variant="subtle" color="gray" aria-label={`Remove ${file.name}`} onClick={() => onRemove(place)}>
              <IconX size={16} />
            </ActionIcon>
          </Group>
        </Paper>
      ))}
    </Group>
  );
}

/** A small picture of a file. The page's policy allows data URLs, and no blob URLs. */
function Thumbnail({ file, isShown }: { file: File; isShown: boolean }) {
  const [url, setUrl] = useState<string>();
  useEffect(() => {
    let isCurrent = true;
    setUrl(undefined);
    if (isShown) void dataUrlOf(file).then((read) => isCurrent && setUrl(read), () => {});
    return () => {
      isCurrent = false;
    };
  }, [file, isShown]);
  return <Image src={url} alt="" w={48} h={48} fit="contain" radius="sm" />;
}
