package rdmanet

import (
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// A connection never has more under way than its completion queue holds: neither where the device rounds the
// lengths of the other queues up, nor where completion queues are short.
func TestCompletionQueueHoldsAll(t *testing.T) {
	for name, limit := range map[string]func(*modest){
		"rounded": func(m *modest) { m.rounds = true },
		"short":   func(m *modest) { m.cqe = 100 },
		"both":    func(m *modest) { m.rounds, m.cqe = true, 100 },
	} {
		t.Run(name, func(t *testing.T) {
			m := newModest(t, 1<<20, 1<<14, false)
			limit(m)
			client, server := messagePipe(t, Config{Provider: m, InitialReceiveCredits: 255, MaxReceiveCredits: 255})
			end := m.end(client)
			holds := end.Depth()

			m.setSlow(true)
			before, messages := end.Posted(), 0
			for ; ; messages++ {
				if _, err := client.WriteMsg([]byte("message"), NonBlocking); err != nil {
					require.ErrorIs(t, err, syscall.EAGAIN)
					break
				}
				require.Less(t, messages, 1000, "nothing bounds what is sent")
			}
			posted := int(end.Posted() - before)
			require.Greater(t, posted, holds/8)
			require.LessOrEqual(t, posted+client.Stats().ReceiveCredits, holds, "%d sends and all receives in a queue of %d", posted, holds)
			t.Logf("%d sends and %d receives in a queue of %d", posted, client.Stats().ReceiveCredits, holds)

			m.setSlow(false)
			for range messages {
				_, err := server.ReadMsg(make([]byte, 16))
				require.NoError(t, err)
			}
		})
	}
}
