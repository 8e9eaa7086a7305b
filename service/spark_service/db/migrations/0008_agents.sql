-- How many uploads and histograms came from which version of the agent, by day: which versions are still in use, and
-- nothing about who sent what. Goes by age with what was received on the day.
CREATE TABLE agent_uploads (
    received_day DATE NOT NULL DEFAULT current_date,
    agent_version VARCHAR NOT NULL,
    uploads UBIGINT NOT NULL,
    histograms UBIGINT NOT NULL,
    PRIMARY KEY (received_day, agent_version)
);
