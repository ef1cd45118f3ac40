/* Headers as of a later rdma-core: the structure that has grown before has one field more. */
#include <infiniband/verbs.h>

struct grown_port_attr {
	struct ibv_port_attr; /* by -fms-extensions */
	uint32_t later;
};
#define ibv_port_attr grown_port_attr
