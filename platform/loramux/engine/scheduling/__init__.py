"""Scheduling: which sequences run in the next step, within one page budget and in fair shares.

One step of the engine is `Scheduler.plan()`, a launch, and `Scheduler.commit()`. A plan is a list of chunks: one token
of every decoding sequence, and as many tokens of prompts as the token budget has left. This is Sarathi-Serve's chunked
prefill (Agrawal et al., OSDI 2024) over Orca's iteration-level batching (Yu et al., OSDI 2022): a long prompt never
stalls the sequences that decode at the same time.

The order of a plan:

1. `scheduler` takes over loads that have ended and rejects requests that have missed their deadline (`deadlines`).
2. `queue` and `fairness` compute the ceilings of service above which a tenant gets no rows in this step. Service is
   counted in *units* as in VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a computed
   prompt token is one, a generated token two, a loaded page of an adapter one. Classes share the engine by weight,
   tenants share their class, and a tenant's requests are served in order of arrival.
3. `admission` preempts running sequences that must yield to the next one: sequences of a lower class that is ahead of
   its share, and sequences of a tenant on borrowed pages.
4. `scheduler` gives rows to the running sequences. If a page is missing, it preempts a victim
   (`CapacityPolicy.victim`).
5. `admission` fills the remaining rows and tokens from the queue. `CapacityPolicy` and `PageBudget` decide what fits:
   they compute the exact peak of KV if every sequence grows to its expected length (`estimates`), in one pool with the
   adapters in use. An adapter that is not in the pool is loaded as a *claim* (`state`): the load starts only if its
   request could run immediately, and the adapter is not evicted before the request has run. So any ratio of adapters to
   memory makes progress; S-LoRA's eviction without claims (Sheng et al., MLSys 2024) does not guarantee this.
6. `scheduler` gives the remaining tokens of the step to prompts of class batch, which come last.
7. `speculation` adds drafts to decoding sequences if drafts save time, with tokens and pages that no other sequence
   needs.

Each module imports only those below it:

    scheduler                 plan and commit
    deadlines   speculation   decisions that change the state: refusals, drafts
    admission                 pure checks of the state (`CapacityPolicy`), and who joins
    state                     the one object that they share; every transition of a sequence
    queue                     the waiting requests
    policy                    the operator's settings, and the page budget
    sequence                  a request's mutable run; the chunks of a step
    fairness                  virtual token counters
    estimates                 step times, answer lengths, queued work, drafts

After a plan that held nothing and changed nothing, the engine waits until `Scheduler.next_plan_at`. Time comes from the
injected clock, so the simulator and the tests run the same code.
"""
