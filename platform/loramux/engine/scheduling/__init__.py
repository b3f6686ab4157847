"""Scheduling: which sequences run in the next step, under one page budget and in fair shares.

One step of the engine is `Scheduler.plan()`, a launch, and `Scheduler.commit()`. A plan is a list of chunks: one token
of every decoding sequence, and as much of the prompts as the token budget has left. That is Sarathi-Serve's chunked
prefill (Agrawal et al., OSDI 2024) over Orca's iteration-level batching (Yu et al., OSDI 2022): a long prompt never
stalls the sequences that decode beside it.

A plan in its order:

1. `scheduler` takes over loads that have ended and rejects what has missed its deadline (`deadlines`).
2. `queue` and `fairness` draw the ceilings above which a tenant sits out this step. Service is counted in *units* as in
   VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a prompt token computed is one, a
   generated token two, an adapter's page loaded one. Classes share the engine by weight, tenants share their class, a
   tenant's requests are first come, first served.
3. `admission` preempts running sequences that must yield to the next one: a lower class that is ahead of its share, a
   tenant on borrowed pages.
4. `scheduler` gives rows to the running sequences. Where a page is missing, a victim is preempted
   (`CapacityPolicy.victim`).
5. `admission` fills the rows and tokens that are left from the queue. `CapacityPolicy` and `PageBudget` decide what
   fits: the exact peak of KV if every sequence grows to its expected length (`estimates`), beside the adapters in use,
   in one pool. An adapter that is not in the pool is loaded as a *claim* (`state`): only where its request could run at
   once, and never evicted before it has. So any ratio of adapters to memory makes progress, as S-LoRA's (Sheng et al.,
   MLSys 2024) eviction without claims does not.
6. `scheduler` gives what is left of the step to prompts of class batch, which gave way until now.
7. `speculation` adds drafts to decoding sequences where they pay, with tokens and pages that nothing else wanted.

The modules, each importing only those below it:

    scheduler                 plan and commit
    deadlines   speculation   decisions that change the state: refusals, drafts
    admission                 pure checks of the state (`CapacityPolicy`), and who joins
    state                     the one object that they share; every transition of a sequence
    queue                     the waiting requests
    policy                    the operator's settings, and the page budget
    sequence                  a request's mutable run; the chunks of a step
    fairness                  virtual token counters
    estimates                 step times, answer lengths, queued work, drafts

A plan that held nothing and changed nothing is followed by a wait: `Scheduler.next_plan_at` says until when. Time is
the injected clock's, so the simulator and the tests run the same code.
"""
