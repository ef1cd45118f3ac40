package iwarp

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Shared memory is on unless the program or the environment says otherwise. What cannot be
// read counts as off.
func TestSameHostDefault(t *testing.T) {
	for _, tt := range []struct {
		name, env string
		mode      SameHost
		want      SameHost
	}{
		{name: "nothing said", want: SameHostOn},
		{name: "on by the environment", env: "on", want: SameHostOn},
		{name: "off by the environment", env: "off", want: SameHostOff},
		{name: "required by the environment", env: "require", want: SameHostRequire},
		{name: "unreadable environment", env: "perhaps", want: SameHostOff},
		{name: "on", env: "off", mode: SameHostOn, want: SameHostOn},
		{name: "off", env: "on", mode: SameHostOff, want: SameHostOff},
		{name: "required", env: "off", mode: SameHostRequire, want: SameHostRequire},
		{name: "no such mode", env: "on", mode: SameHostRequire + 1, want: SameHostOff},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(SameHostEnv, tt.env)
			require.Equal(t, tt.want, New(Config{SameHost: tt.mode}).dev.cfg.SameHost)
		})
	}
}
