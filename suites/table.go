package main

import "time"

// suite is a module whose own tests are run.
type suite struct {
	name     string
	module   string
	version  string
	sum      string        // sum is the checksum of the module in go.sum.
	packages []string      // packages has the folders whose tests are run.
	rewrite  []string      // rewrite has further folders that listen or dial.
	run      string        // run is the value of -test.run, if not all tests are run.
	hostEnv  []string      // hostEnv has more variables for the tests on the host.
	timeout  time.Duration // timeout is a generous limit for one package on the host.
	quick    bool          // quick is set if both transports together take less than a minute. Every change runs the suite then.
	server   bool          // server is set if the suite needs redis-server.
	outside  []string      // outside has tests that run outside of their synctest bubbles; see shim.SynctestTest.
	inGuest  []adaptation
	known    []known
}

// adaptation replaces a text in a file of a module, because the test would not pass in a
// guest. Runs in a guest have it in both copies, the one for TCP and the one for rdmanet.
//
// The text may be a time limit or an amount of data, because the guest emulates the
// processor and is slow. It may be a clock, where the test passes only if two requests come
// within a millisecond. Or it may be the loopback address, which RDMA devices do not have.
type adaptation struct {
	file     string
	old, new string
}

// known is a test that is not expected to pass.
type known struct {
	test   string // test is the full name of the test.
	cause  cause
	guest  bool // guest is set if the test fails only in guests, which are ten times slower.
	flaky  bool // flaky is set if the test passes at times. It must do so over rdmanet too if it does over TCP.
	reason string
}

// cause is the kind of reason why a test does not pass.
type cause int

const (
	alsoTCP cause = iota // alsoTCP: the test does not pass over TCP either.
	differs              // differs: the test needs something that differs in rdmanet according to docs/semantics.md.
)

func (c cause) String() string {
	return [...]string{"over TCP as well", "differs from TCP"}[c]
}

// suites is the table of all suites: their versions, and the tests that are not expected to
// pass.
var suites = []suite{
	{
		name:     "yamux",
		module:   "github.com/hashicorp/yamux",
		version:  "v0.1.2",
		sum:      "h1:XtB8kyFOyHXYVFnwT5C3+Bdo8gArse7j2AQ0DA0Uey8=",
		packages: []string{"."},
		inGuest: []adaptation{
			{"session_test.go", "conf.ConnectionWriteTimeout = 250 * time.Millisecond", "conf.ConnectionWriteTimeout = 5 * time.Second"},
			{"session_test.go", "const timeout = 25 * time.Millisecond", "const timeout = time.Second"},
			{"session_test.go", "time.After(1 * time.Second)", "time.After(time.Minute)"},
			{"session_test.go", "time.Second, \"timeout\"", "time.Minute, \"timeout\""},
			{"session_test.go", "sendSize = 250 * 1024 * 1024", "sendSize = 25 * 1024 * 1024"},
			{"session_test.go", "n int64 = 1 * 1024 * 1024 * 1024", "n int64 = 4 * 1024 * 1024"},
		},
		timeout: 5 * time.Minute,
	},
	{
		name:     "raft",
		quick:    true,
		module:   "github.com/hashicorp/raft",
		version:  "v1.8.0",
		sum:      "h1:YbfecBcuTar/LNFEDfVTpqu9Aw+MczTk7MYczvy+62k=",
		packages: []string{"."},
		run:      "Transport|Integ",
		inGuest: []adaptation{
			{"net_transport_test.go", "time.After(200 * time.Millisecond)", "time.After(20 * time.Second)"},
			{"net_transport_test.go", ", time.Second, newTestLogger", ", time.Minute, newTestLogger"},
		},
		hostEnv: []string{"INTEG_TESTS=1"}, // Its clusters elect a leader in 50 ms, which is too short for a guest.
		known: []known{
			{
				test:   "TestNetworkTransport_AppendEntriesPipeline_CloseStreams",
				guest:  true,
				flaky:  true,
				reason: "it wants a request to fail when the streams are closed, though all may have been answered by then",
			},
			{
				test:   "TestNetworkTransport_InstallSnapshot",
				flaky:  true,
				reason: "its consumer gives up after 200 ms, which a busy machine exceeds",
			},
		},
		timeout: 5 * time.Minute,
	},
	{
		name:     "http2",
		quick:    true,
		module:   "golang.org/x/net",
		version:  "v0.62.0",
		sum:      "h1:18ELalfM5+XNRwzM2nYqXsZQ9ByS1uhj2O/U7+5jqRY=",
		packages: []string{"http2", "http2/h2c"},
		outside: []string{
			"TestExpect100ContinueAfterHandlerWrites",
			"TestContentEncodingNoSniffing",
			"TestIssue20704Race",
			"TestServerSetReadWriteDeadlineRace",
			"TestServerWriteDoesNotRetainBufferAfterReturn",
			"TestServerWriteDoesNotRetainBufferAfterServerClose",
			"TestServerWritesUndeclaredTrailers",
			"TestServer_Advertises_Common_Cipher",
			"TestTransportBodyDoubleEndStream",
			"TestTransportBodyLargerThanSpecifiedContentLength_len2",
			"TestTransportBodyLargerThanSpecifiedContentLength_len3",
			"TestTransport300ResponseBody",
			"TestTransportCloseResponseBodyWhileRequestBodyHangs",
			"TestTransportContentLengthWithoutBody",
			"TestTransportSlowWrites",
			"TestUnreadFlowControlReturned_Server",
		},
		timeout: 5 * time.Minute,
	},
	{
		name:     "ssh",
		quick:    true,
		module:   "golang.org/x/crypto",
		version:  "v0.58.0",
		sum:      "h1:COkYLr4k7nDI4r6QtMML2AfzeIswWHAJthLS6K/M/54=",
		packages: []string{"ssh", "ssh/agent"},
		inGuest: []adaptation{
			{"ssh/client_auth_test.go", "127.0.0.42/24,::42/120", "127.0.0.42/24,::42/120,10.77.0.42/24"},
			{"ssh/server_test.go", "127.0.0.0/8,::1/128", "127.0.0.0/8,::1/128,10.77.0.0/24"},
		},
		timeout: 5 * time.Minute,
	},
	{
		name:     "websocket",
		quick:    true,
		module:   "github.com/gorilla/websocket",
		version:  "v1.5.3",
		sum:      "h1:saDtZ6Pbx/0u+bgYQ3q96pZgCzfhKXGPqt7kZ72aNNg=",
		packages: []string{"."},
		timeout:  5 * time.Minute,
	},
	{
		name:     "miniredis",
		quick:    true,
		module:   "github.com/alicebob/miniredis/v2",
		version:  "v2.40.0",
		sum:      "h1:6IgTQbvm2JiMYZ8yur/acNJzVjtSOWCelxXbk/LUBXc=",
		packages: []string{".", "server"},
		rewrite:  []string{"proto"},
		inGuest: []adaptation{ // a clock that stands, as two requests take more than a millisecond there
			{"cmd_generic_test.go", `must1(t, c, "PEXPIREAT", "foo", "10413792000123")`, `s.SetTime(time.Now()); must1(t, c, "PEXPIREAT", "foo", "10413792000123")`},
		},
		timeout: 5 * time.Minute,
		known: []known{{
			test:   "TestPExpireTime/#00",
			flaky:  true,
			reason: "it sets a time in milliseconds, which miniredis keeps as a distance from now, and may get the next one back",
		}},
	},
	{
		name:     "redigo",
		quick:    true,
		module:   "github.com/gomodule/redigo",
		version:  "v1.9.3",
		sum:      "h1:dNPSXeXv6HCq2jdyWfjgmhBdqnR6PRO3m/G05nvpPC8=",
		packages: []string{"redis"},
		server:   true,
		inGuest: []adaptation{
			{"redis/pool_test.go", "time.After(2 * time.Second)", "time.After(time.Minute)"},
			{"redis/test_test.go", "DialReadTimeout(1 * time.Second)", "DialReadTimeout(time.Minute)"},
		},
		timeout: 5 * time.Minute,
		known: []known{
			{test: "redis.ExampleScan", reason: "miniredis has no SORT"},
			{test: "redis.ExampleScanSlice", reason: "miniredis has no SORT"},
			{test: "redis.TestLatency", reason: "miniredis has no CONFIG"},
			{test: "redis.TestLatencyHistories", reason: "miniredis has no CONFIG"},
			{
				test:   "redis.TestReadTimeout",
				cause:  differs,
				reason: "it writes when the peer has closed, and that fails at once: the end of a queue pair is the end both ways",
			},
			{test: "redis.TestSlowLog", reason: "miniredis has no CONFIG"},
		},
	},
	{
		name:     "smux",
		module:   "github.com/xtaci/smux",
		version:  "v1.5.58",
		sum:      "h1:Vdw+LT24TJb+HJX+D8zIY5imm71DoAO/DKOVJUmknG4=",
		packages: []string{"."},
		inGuest: []adaptation{
			{"session_test.go", "const N = 8 << 30", "const N = 64 << 20"},
			{"session_test.go", "const N = 1 << 30", "const N = 16 << 20"},
		},
		timeout: 5 * time.Minute,
	},
}
