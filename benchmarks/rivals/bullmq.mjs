// BullMQ: answers the same requests as benchmarks/client.py, or runs as a worker (`node bullmq.mjs worker`).
// The packages are in the folder BENCH_NODE, which tools/environment.py fills.

import { createRequire } from "node:module";
import { closeSync, openSync, readFileSync, writeSync } from "node:fs";
import { createInterface } from "node:readline";

const require = createRequire(`${process.env.BENCH_NODE}/package.json`);
const { Queue, Worker } = require("bullmq");
const Redis = require("ioredis");

const address = new URL(process.env.BENCH_REDIS_URL);
const connection = { host: address.hostname, port: Number(address.port), maxRetriesPerRequest: null };
const quiet = { removeOnComplete: true, removeOnFail: true };

const docs = "https://docs.bullmq.io/guide";
const settings = [
  ["worker `concurrency: 50`, two processes to drain", `${docs}/workers/concurrency`],
  ["`removeOnComplete`", `${docs}/queues/auto-removal-of-jobs`],
  ["`addBulk`, 1,000 jobs a call", `${docs}/queues/adding-bulks`],
];
const versionOf = (name) =>
  JSON.parse(readFileSync(`${process.env.BENCH_NODE}/node_modules/${name}/package.json`)).version;

function record(file, due) {
  const buffer = Buffer.alloc(16);
  buffer.writeDoubleLE(due, 0);
  buffer.writeDoubleLE((performance.timeOrigin + performance.now()) / 1000, 8);
  writeSync(file, buffer);
}

if (process.argv[2] === "worker") {
  const file = openSync(process.env.BENCH_RECORDS, "a");
  const worker = new Worker("bench", async (job) => record(file, job.data.due), { connection, concurrency: 50 });
  process.on("SIGTERM", () => worker.close(true).then(() => { closeSync(file); process.exit(0); }));
} else {
  await answer();
}

async function answer() {
  const queue = new Queue("bench", { connection });
  const redis = new Redis(connection);
  let pks = [];
  let handles = [];
  const delayed = (at) => ({ ...quiet, delay: Math.max(0, Math.round(at * 1000 - Date.now())) });
  const far = (ahead = 1800) => Date.now() / 1000 + ahead;

  async function metered(count, work) {
    const began = performance.now();
    const cpu = process.cpuUsage();
    await work();
    const used = process.cpuUsage(cpu);
    const seconds = (performance.now() - began) / 1000;
    return { cpu_us: (used.user + used.system) / count, per_second: count / seconds };
  }

  async function addMany(jobs) {
    for (let start = 0; start < jobs.length; start += 1000) await queue.addBulk(jobs.slice(start, start + 1000));
  }

  const usedMemory = async () => Number(/used_memory:(\d+)/.exec(await redis.info("memory"))[1]);
  const operations = {
    describe: async () => ({ title: "bullmq", version: versionOf("bullmq"), settings }),
    clear: async () => { await redis.flushall(); },
    prepare_for: async (job, count) => operations.prepare(count),
    prepare: async (count) => { pks = Array.from({ length: count }, (_, n) => n + 1); },
    schedule_one: async (count, ahead) => {
      handles = [];
      const at = far(ahead);
      return metered(count, async () => {
        for (const pk of pks.slice(0, count)) handles.push(await queue.add("note", { pk, due: at }, delayed(at)));
      });
    },
    schedule_inside: async () => null,
    cancel_one: async () => {
      const jobs = handles;
      return metered(jobs.length, async () => { for (const job of jobs) await job.remove(); });
    },
    bulk: async (count, ahead) => {
      const at = far(ahead);
      const jobs = pks.slice(0, count).map((pk) => ({ name: "note", data: { pk, due: at }, opts: delayed(at) }));
      return metered(count, () => addMany(jobs));
    },
    enqueue: async (job, count) => {
      await operations.prepare(count);
      await addMany(pks.slice(0, count).map((pk) => ({ name: job, data: { pk, due: 0 }, opts: quiet })));
    },
    at_times: async (times) => {
      await addMany(times.map((at, n) => ({ name: "note", data: { pk: n, due: at }, opts: delayed(at) })));
    },
    bytes_stored: async () => ({ redis_bytes: await usedMemory() }),
    fill: async (count, ahead) => { await operations.prepare(count); await operations.bulk(count, ahead); },
    worker: async (kind) => Array.from({ length: kind === "drain" ? 2 : 1 }, () => [process.execPath, process.argv[1], "worker"]),
  };

  for await (const line of createInterface({ input: process.stdin })) {
    const { operation, args } = JSON.parse(line);
    let reply;
    try {
      reply = { result: (await operations[operation](...args)) ?? null };
    } catch (error) {
      reply = { error: String(error) };
    }
    process.stdout.write(`${JSON.stringify(reply)}\n`);
  }
  process.exit(0);
}
