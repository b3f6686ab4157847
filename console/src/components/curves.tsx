// Lines over the steps of a training, and the same figures as a table for readers without the picture.
import { Box, useComputedColorScheme, useMantineTheme, VisuallyHidden } from "@mantine/core";
import { Chart, Legend, LinearScale, LineController, LineElement, PointElement, Tooltip } from "chart.js";
import { useEffect, useRef } from "react";
import * as format from "../format";

Chart.defaults.font.family = "'Inter Variable', system-ui, sans-serif";
Chart.register(Legend, LinearScale, LineController, LineElement, PointElement, Tooltip);

const COLORS = ["teal", "orange"];
const HEIGHT = 260;
/** Lines with more points have no dots. */
const DOTTED = 30;

export interface Curve {
  name: string;
  points: { x: number; y: number }[];
}

export default function Curves({ label, curves }: { label: string; curves: Curve[] }) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const chart = useRef<Chart<"line", { x: number; y: number }[]> | null>(null);
  const theme = useMantineTheme();
  const isDark = useComputedColorScheme("light") === "dark";

  useEffect(() => {
    const made = new Chart<"line", { x: number; y: number }[]>(canvas.current!, { type: "line", data: { datasets: [] } });
    chart.current = made;
    return () => made.destroy();
  }, []);

  useEffect(() => {
    const ink = isDark ? theme.colors.dark[1] : theme.colors.gray[7];
    const lines = isDark ? theme.colors.dark[5] : theme.colors.gray[2];
    const shown = chart.current!;
    shown.data.datasets = curves.map((curve, place) => {
      const color = theme.colors[COLORS[place % COLORS.length]!]![6];
      return {
        label: curve.name,
        data: curve.points,
        borderColor: color,
        backgroundColor: color,
        borderWidth: 2,
        pointRadius: curve.points.length > DOTTED ? 0 : 3,
      };
    });
    shown.options = {
      animation: false,
      parsing: false,
      maintainAspectRatio: false,
      interaction: { mode: "nearest", axis: "x", intersect: false },
      plugins: {
        legend: { display: curves.length > 1, align: "start", labels: { color: ink, boxWidth: 10, boxHeight: 10, padding: 14 } },
        tooltip: {
          callbacks: {
            title: (items) => `Step ${format.count(items[0]?.parsed.x ?? 0)}`,
            label: (item) => `${item.dataset.label}: ${format.significant(item.parsed.y ?? 0)}`,
          },
        },
      },
      scales: {
        x: { type: "linear", grid: { display: false }, ticks: { color: ink, precision: 0, maxRotation: 0, autoSkipPadding: 24 } },
        y: { beginAtZero: true, border: { display: false }, grid: { color: lines }, ticks: { color: ink, maxTicksLimit: 6 } },
      },
    };
    shown.update();
  }, [curves, isDark, theme]);

  return (
    <Box component="figure" m={0} aria-label={label}>
      <Box h={HEIGHT} pos="relative" aria-hidden>
        <canvas ref={canvas} />
      </Box>
      <VisuallyHidden>
        <table>
          <caption>{label}</caption>
          <tbody>
            {curves.flatMap((curve) =>
              curve.points.map((point) => (
                <tr key={`${curve.name} ${point.x}`}>
                  <th scope="row">{`Step ${format.count(point.x)}`}</th>
                  <td>{`${curve.name}: ${format.significant(point.y)}`}</td>
                </tr>
              )),
            )}
          </tbody>
        </table>
      </VisuallyHidden>
    </Box>
  );
}
