-- A step that had failed is in doubt again once its receiver is asked, it is parked, or an operator says that it did not take effect:
-- the views of steps say so. Nothing but views is made anew.
DROP VIEW agent_step_journal;
DROP VIEW run_steps;
DROP VIEW step_entries;

-- One row per position that has an intent: which of its entries say what.
CREATE VIEW step_entries AS
SELECT
    run_id,
    min(CASE WHEN kind = 'intent' THEN seq END) AS first_intent,
    max(CASE WHEN kind = 'outcome' THEN seq END) AS last_outcome,
    max(CASE WHEN kind IN ('intent', 'outcome') THEN seq END) AS last_dispatch,
    max(CASE WHEN kind IN ('asked', 'parked', 'resolved') THEN seq ELSE 0 END) AS last_doubt,
    max(CASE WHEN json_extract(body, '$.step_state') IS NOT NULL THEN seq END) AS last_state,
    max(seq) AS last_entry
FROM readable_entries
WHERE position IS NOT NULL
GROUP BY run_id, position
HAVING first_intent IS NOT NULL;

CREATE VIEW run_steps AS
SELECT
    'step_' || lower(hex(substr(i.roots, 1, 10))) AS step_id,
    g.run_id,
    json_extract(i.body, '$.step') AS step_number,
    json_extract(i.body, '$.tool') AS tool_name,
    i.payload AS arguments_json,
    json_extract(s.body, '$.step_state') AS state,
    CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN o.payload END AS output_json,
    CASE WHEN json_extract(o.body, '$.ok') <> 'completed' THEN
        json_extract(o.payload, '$.type') || coalesce(': ' || nullif(json_extract(o.payload, '$.message'), ''), '')
    END AS error_message,
    lower(nullif(hex(i.fingerprint), '')) AS fingerprint,
    json_extract(i.body, '$.at') AS created_at,
    CASE WHEN g.last_dispatch = g.last_outcome AND g.last_outcome > g.last_doubt THEN json_extract(o.body, '$.at') END AS completed_at,
    g.last_entry AS state_version,
    json_extract(i.body, '$.key') AS idempotency_key,
    lower(nullif(hex(i.digest), '')) AS input_digest,
    CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN lower(nullif(hex(o.digest), '')) END AS output_digest,
    json_extract(d.body, '$.left') AS retry_budget_remaining,
    json_extract(l.body, '$.token') AS fencing_token
FROM step_entries g
JOIN readable_entries i ON i.run_id = g.run_id AND i.seq = g.first_intent
LEFT JOIN readable_entries o ON o.run_id = g.run_id AND o.seq = g.last_outcome
LEFT JOIN readable_entries d ON d.run_id = g.run_id AND d.seq = g.last_dispatch
LEFT JOIN readable_entries s ON s.run_id = g.run_id AND s.seq = g.last_state
LEFT JOIN readable_entries l ON l.run_id = g.run_id AND l.seq = g.last_entry
ORDER BY g.run_id, g.first_intent;

-- The same steps as a journal of dispatches. A step is in doubt when who dispatched it last no longer holds the run.
CREATE VIEW agent_step_journal AS
SELECT
    g.run_id AS task_id,
    json_extract(i.body, '$.step') AS step_index,
    json_extract(i.body, '$.tool') AS tool_name,
    json_extract(i.body, '$.key') AS idempotency_key,
    i.payload AS arguments_json,
    CASE
        WHEN g.last_dispatch = g.last_outcome AND g.last_outcome > g.last_doubt THEN
            CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN 'committed' ELSE 'failed' END
        WHEN r.owner IS NOT NULL AND r.fencing_token = json_extract(d.body, '$.token') THEN 'pending'
        ELSE 'in_doubt'
    END AS status,
    CASE WHEN json_extract(o.body, '$.ok') = 'completed' THEN o.payload END AS output_json,
    json_extract(i.body, '$.at') AS created_at,
    json_extract(l.body, '$.at') AS updated_at
FROM step_entries g
LEFT JOIN runs r ON r.run_id = g.run_id
JOIN readable_entries i ON i.run_id = g.run_id AND i.seq = g.first_intent
LEFT JOIN readable_entries o ON o.run_id = g.run_id AND o.seq = g.last_outcome
LEFT JOIN readable_entries d ON d.run_id = g.run_id AND d.seq = g.last_dispatch
LEFT JOIN readable_entries l ON l.run_id = g.run_id AND l.seq = g.last_entry
ORDER BY g.run_id, g.first_intent;
