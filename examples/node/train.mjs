// A training loop in Node.js whose work survives its machine. All it knows of Keepstep is agent.proto.
//
//   keepstep run --to s3://bucket/runs/demo -- node examples/node/train.mjs
//
// Without an agent it trains all the same and saves on the local disk.

import { closeSync, existsSync, fsyncSync, mkdirSync, openSync, readFileSync, readdirSync } from "node:fs";
import { renameSync, rmSync, writeFileSync } from "node:fs";
import path from "node:path";
import { setImmediate } from "node:timers/promises";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import protobuf from "protobufjs";

// In a project of your own: a copy of agent.proto beside this file.
const PROTO = fileURLToPath(new URL("../../proto/keepstep_api/v1/agent.proto", import.meta.url));
const CALL_SECONDS = 8;
const ANNOUNCE_SECONDS = 60; // It makes the files durable, which a busy disk may take its time for.
const COMMIT_SECONDS = 600;
const AWAY_SECONDS = 5; // How long an agent that does not answer is left alone.
const SOCKET_PATH_LIMIT_BYTES = 107; // The kernel's; Node.js would cut the path and connect to another file.
const JUST_IN_TIME_EXIT_CODE = 143; // Never 0: a Kubernetes Job would take the training for done.
const NOT_STORED_EXIT_CODE = 75;

const { values: options } = parseArgs({
  options: { steps: { type: "string", default: "10000" }, "save-every": { type: "string", default: "1000" } },
});
const STEPS = Number(options.steps);
const SAVE_EVERY = Number(options["save-every"]); // 0: never by itself.

// `keepstep run` and the Kubernetes injection set these; the defaults are those of `keepstep run`.
const VOLUME = path.resolve(process.env.KEEPSTEP_VOLUME || "keepstep");
const SOCKET = path.resolve(process.env.KEEPSTEP_SOCKET || path.join(VOLUME, ".keepstep", "agent.sock"));
const CHECKPOINTS = path.resolve(process.env.KEEPSTEP_CHECKPOINT_DIRECTORY || path.join(VOLUME, "checkpoints"));

/** One line per event. */
function say(event, fields = {}) {
  const quoted = (value) => (/\s/.test(value) ? JSON.stringify(value) : value);
  console.log([event, ...Object.entries(fields).map(([name, value]) => `${name}=${quoted(value)}`)].join(" "));
}

// ---- The agent: calls with a deadline, and one stream that shows it that we live -----------------------------------

const errorDetails = protobuf.parse(`
  syntax = "proto3"; package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }`).root;
const Status = errorDetails.lookupType("google.rpc.Status");
const ErrorInfo = errorDetails.lookupType("google.rpc.ErrorInfo");

/** Why the agent refused a call: {reason, domain, metadata: {hint}}; null when it was not the agent that answered. */
function errorInfo(error) {
  const [status] = error.metadata?.get("grpc-status-details-bin") ?? [];
  const info = status && Status.decode(status).details.find((one) => one.typeUrl.endsWith("/google.rpc.ErrorInfo"));
  return info ? ErrorInfo.decode(info.value) : null;
}

class Agent {
  attached = false;
  saveAsked = false;
  stopping = false;
  #client;
  #stream;
  #silent = false;

  constructor() {
    if (Buffer.byteLength(SOCKET) > SOCKET_PATH_LIMIT_BYTES) {
      const message = `the socket's path is longer than ${SOCKET_PATH_LIMIT_BYTES} bytes: ${SOCKET}`;
      say("error", { message, hint: "set KEEPSTEP_SOCKET to a shorter path, for the agent too" });
      process.exit(2);
    }
    const definition = protoLoader.loadSync(PROTO, { keepCase: true, longs: Number, enums: String, defaults: true });
    const { keepstep } = grpc.loadPackageDefinition(definition);
    this.#client = new keepstep.v1.Agent(`unix:${SOCKET}`, grpc.credentials.createInsecure(), {
      "grpc.initial_reconnect_backoff_ms": 1000,
      "grpc.max_reconnect_backoff_ms": AWAY_SECONDS * 1000, // Else up to two minutes pass before it is seen again.
    });
  }

  /** The answer; throws when there is none in time or the agent refuses. */
  call(method, request, seconds = CALL_SECONDS) {
    return new Promise((resolve, reject) => {
      const done = (error, answer) => (error ? reject(error) : resolve(answer));
      this.#client[method](request, { deadline: Date.now() + seconds * 1000 }, done);
    });
  }

  /** The answer, or null after saying why there is none: training goes on without it. */
  async ask(method, request, seconds) {
    try {
      return await this.call(method, request, seconds);
    } catch (error) {
      const info = errorInfo(error);
      if (info) {
        say("refused", { call: method, reason: info.reason, message: error.details }); // It ends with the hint.
        return null;
      }
      if (!this.#silent) {
        const hint = "start this with `keepstep run --to DESTINATION -- node train.mjs`, or see the agent's log";
        say("no-answer", { call: method, message: error.details, hint });
      }
      this.#silent = true;
      this.attached = false;
      this.#stream.cancel(); // And begin anew.
      return null;
    }
  }

  /** Be known as a live trainer, now and again whenever the agent comes back. Returns after the first try. */
  async attach() {
    const who = { local_rank: 0, rank: 0, world_size: 1, client: "node-example" };
    this.#stream = this.#client.Attach(who);
    this.#stream.on("data", (request) => {
      say("asked", { to: request.terminating ? "stop" : "save", number: request.number });
      this.stopping ||= request.terminating;
      this.saveAsked ||= !request.terminating;
    });
    this.#stream.on("error", () => {}); // "status" comes after it.
    this.#stream.on("status", () => {
      this.attached = false;
      setTimeout(() => this.attach(), AWAY_SECONDS * 1000);
    });
    // After Attach, so that a notice is either in this answer or sent later.
    const known = await this.ask("Register", { ...who, pid: process.pid });
    if (!known) return;
    this.attached = true;
    this.#silent = false;
    this.stopping ||= known.terminating;
    say("attached", { agent: known.agent_version, volume: known.volume, terminating: known.terminating });
  }
}

// ---- Checkpoints on the disk: what is called checkpoint-<step> is complete -----------------------------------------

const nameOf = (step) => `checkpoint-${step}`;

/** Steps of the checkpoints here, the newest first. */
function localSteps() {
  const matches = readdirSync(CHECKPOINTS).map((entry) => /^checkpoint-(\d+)$/.exec(entry));
  return matches.filter(Boolean).map((match) => Number(match[1])).sort((one, other) => other - one);
}

function syncPath(file) {
  const descriptor = openSync(file, "r");
  fsyncSync(descriptor);
  closeSync(descriptor);
}

/** Write under a temporary name, make durable, rename: a crash leaves no half checkpoint under a good name. */
function writeCheckpoint(state) {
  const final = path.join(CHECKPOINTS, nameOf(state.step));
  if (existsSync(final)) return final;
  const temporary = path.join(CHECKPOINTS, `.saving-${nameOf(state.step)}`);
  rmSync(temporary, { recursive: true, force: true });
  mkdirSync(temporary);
  writeFileSync(path.join(temporary, "weights.bin"), state.weights);
  writeFileSync(path.join(temporary, "state.json"), JSON.stringify({ step: state.step }));
  for (const entry of readdirSync(temporary)) syncPath(path.join(temporary, entry));
  syncPath(temporary);
  renameSync(temporary, final);
  syncPath(CHECKPOINTS);
  return final;
}

function readCheckpoint(step) {
  const directory = path.join(CHECKPOINTS, nameOf(step));
  const bytes = readFileSync(path.join(directory, "weights.bin"));
  // Copied, because a Float64Array must begin at a multiple of 8.
  const weights = new Float64Array(new Uint8Array(bytes).buffer);
  return { step: JSON.parse(readFileSync(path.join(directory, "state.json"), "utf8")).step, weights };
}

// ---- Saving: begin, write, announce; the agent does the rest beside the training -----------------------------------

const agent = new Agent();
let announcedStep = -1;
let unannounced = null; // What to announce once the agent is back.
let commit = Promise.resolve();

async function save(state, kind) {
  const { step } = state;
  if (step === announcedStep) return; // The same bytes: nothing to add, also just in time.
  const begun = agent.attached ? await agent.ask("BeginSave", { step, kind }) : null;
  if (begun && !begun.admitted) {
    say("not-admitted", { step, reason: begun.reason });
    return;
  }
  let directory;
  try {
    directory = writeCheckpoint(state);
  } catch (error) {
    say("not-saved", { step, message: error.message });
    if (begun) await agent.ask("AbortSave", { save: begun.save });
    return;
  }
  say("saved", { name: nameOf(step), kind });
  unannounced = { path: directory, step, name: nameOf(step), kind, save: begun?.save ?? "", rank: 0, world_size: 1 };
  // After the last of all saves there is no other time.
  if (agent.attached || kind !== "KIND_PERIODIC") await announce();
  // One that nobody else has may yet be damaged, so the one before it stays.
  for (const older of localSteps().filter((one) => one < step).slice(step === announcedStep ? 0 : 1)) {
    rmSync(path.join(CHECKPOINTS, nameOf(older)), { recursive: true, force: true });
  }
}

/** After it the files are staged, and may be deleted here. */
async function announce() {
  const request = unannounced;
  const seconds = agent.attached ? ANNOUNCE_SECONDS : CALL_SECONDS;
  const announced = await agent.ask("AnnounceCheckpoint", request, seconds);
  if (agent.attached) unannounced = null; // It answered: accepted, or refused for good.
  if (!announced) return;
  announcedStep = request.step;
  say("announced", { name: request.name, save: announced.save, bytes: announced.size_bytes, phase: announced.phase });
  commit = agent.ask("WaitCommitted", { save: announced.save }, COMMIT_SECONDS).then((answer) => {
    if (answer) say("committed", { name: answer.checkpoint.name, save: answer.checkpoint.save });
  });
}

// ---- The training: yours instead -----------------------------------------------------------------------------------

const TRUTH = Float64Array.from({ length: 64 }, (_, index) => Math.sin(index));

/** One step of gradient descent on one example, which follows from the step alone. */
function trainOneStep(state) {
  const inputs = TRUTH.map((_, index) => Math.cos(index * (state.step + 1)));
  const error = inputs.reduce((sum, input, index) => sum + input * (state.weights[index] - TRUTH[index]), 0);
  state.weights = state.weights.map((weight, index) => weight - 0.001 * error * inputs[index]);
  state.step += 1;
}

let signalled = false;
process.on("SIGTERM", () => {
  say("signal", { name: "SIGTERM" });
  signalled = agent.stopping = true;
});
await agent.attach();

mkdirSync(CHECKPOINTS, { recursive: true });
for (const entry of readdirSync(CHECKPOINTS).filter((name) => name.startsWith(".saving-"))) {
  rmSync(path.join(CHECKPOINTS, entry), { recursive: true, force: true }); // Of a process that was killed.
}
const [newest] = localSteps();
const state = newest === undefined ? { step: 0, weights: new Float64Array(TRUTH.length) } : readCheckpoint(newest);
say("begin", { step: state.step });

while (state.step < STEPS && !agent.stopping) {
  trainOneStep(state);
  // Signals and the agent's requests are heard only when Node.js gets its turn.
  await setImmediate();
  if (unannounced && agent.attached) await announce();
  const due = agent.saveAsked || (SAVE_EVERY > 0 && state.step % SAVE_EVERY === 0);
  if (due && !agent.stopping && state.step < STEPS) {
    agent.saveAsked = false;
    await save(state, "KIND_PERIODIC");
  }
}

if (agent.stopping) {
  // The agent may not have got the signal; told of it, it sends this checkpoint before all others.
  if (signalled) await agent.ask("NotifyTermination", { source: "train.mjs SIGTERM" });
  await save(state, "KIND_JUST_IN_TIME");
  const code = localSteps().includes(state.step) ? JUST_IN_TIME_EXIT_CODE : NOT_STORED_EXIT_CODE;
  say("leave", { step: state.step, code });
  process.exit(code);
}
await save(state, "KIND_FINAL");
await commit;
const distance = Math.hypot(...state.weights.map((weight, index) => weight - TRUTH[index]));
say("done", { step: state.step, distance });
process.exit(0);
