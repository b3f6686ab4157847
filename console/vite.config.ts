import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { brotliCompressSync } from "node:zlib";
import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";

// The server puts a nonce of its own into each answer in place of this text (loramux_api/controllers/console.py).
const NONCE = "NONCE-OF-THIS-ANSWER";

/** Write each text beside itself compressed: the server sends it as it lies there. */
function brotli(): Plugin {
  return {
    name: "brotli",
    writeBundle({ dir }) {
      const assets = join(dir!, "assets");
      for (const name of readdirSync(assets).filter((one) => /\.(js|css)$/.test(one))) {
        writeFileSync(join(assets, `${name}.br`), brotliCompressSync(readFileSync(join(assets, name))));
      }
    },
  };
}

export default defineConfig({
  base: "/console/",
  plugins: [react(), brotli()],
  html: { cspNonce: NONCE },
  build: {
    outDir: "../api/loramux_api/console",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  server: {
    proxy: {
      "/v1": "http://127.0.0.1:8000",
      "/admin": "http://127.0.0.1:8000",
      "/console/session": "http://127.0.0.1:8000",
    },
  },
});
