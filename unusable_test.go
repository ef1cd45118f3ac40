package rdmanet

import (
	"bytes"
	"errors"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
)

// withUnusable is a provider that has left a device out.
type withUnusable struct {
	ibv.Provider
	err error
}

func (p withUnusable) Unusable() error { return p.err }

// The logger is told of a device that is left out while others are used.
func TestUnusableDeviceLogged(t *testing.T) {
	const device = "an RDMA device of this test"
	rdmaProviders.Lock()
	if rdmaProviders.m == nil {
		rdmaProviders.m = make(map[string]ibv.Provider)
	}
	rdmaProviders.m[device] = withUnusable{software, errors.New("sick0: query device: input/output error")}
	rdmaProviders.Unlock()
	defer func() {
		rdmaProviders.Lock()
		defer rdmaProviders.Unlock()
		delete(rdmaProviders.m, device)
	}()
	t.Setenv(deviceEnv, device)
	var log bytes.Buffer
	cfg := Config{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	_, err := cfg.providers()
	require.NoError(t, err)
	require.Contains(t, log.String(), "sick0: query device: input/output error")
}
